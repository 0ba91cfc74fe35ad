use crate::architectures::Architecture;

/// A `config.json` that is not a Llama's, or does not hold together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelConfigError {
    /// Not JSON, a field that is needed and absent, or a field of another type.
    #[error("not the configuration of a model")]
    Json(#[from] serde_json::Error),
    /// A model of another architecture.
    #[error("the architecture is {}; this version reads {}", found.escape_debug(), Architecture::names())]
    Architecture {
        /// The value in the file.
        found: String,
    },
    /// A field with a value that is not supported.
    #[error("`{field}` is {found}; this version reads {expected}")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// The value.
        found: String,
        /// The accepted values.
        expected: &'static str,
    },
    /// A field with a value that models of the architecture do not have.
    #[error("`{field}` is {found}, which a {architecture} does not have")]
    NotOfArchitecture {
        /// The field.
        field: &'static str,
        /// The value.
        found: String,
        /// The architecture.
        architecture: Architecture,
    },
    /// Layers with and without a sliding window in another order than is read.
    #[error(
        "`layer_types` says {found} for layer {layer}, the other fields say {expected}; this version reads layers that agree"
    )]
    LayerType {
        /// The first layer that differs.
        layer: usize,
        /// The contents of `layer_types`.
        found: String,
        /// The value that follows from `sliding_window`, `use_sliding_window` and
        /// `max_window_layers`.
        expected: &'static str,
    },
    /// A field of the rotary scaling that is absent.
    #[error("`{field}` is missing; {rope_type} rotary scaling needs it")]
    MissingRopeField {
        /// The field.
        field: &'static str,
        /// The kind of scaling.
        rope_type: &'static str,
    },
    /// A field of the rotary scaling of another type.
    #[error("`{field}` of the rotary scaling cannot be read")]
    RopeField {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A field of the rotary scaling that changes logits, and is not read.
    #[error("`{}` of the rotary scaling is {}; this version does not compute with it, and the logits would be others", field.escape_debug(), found.escape_debug())]
    UnreadRopeField {
        /// The field.
        field: String,
        /// Its JSON.
        found: String,
    },
    /// Rotary factors for another number of frequencies.
    #[error(
        "`{field}` has {found} numbers; there are {expected} frequencies, half of the rotated features of a head"
    )]
    RopeFactors {
        /// The field.
        field: &'static str,
        /// Frequencies.
        expected: usize,
        /// Numbers found.
        found: usize,
    },
    /// A size of zero, or absurdly large.
    #[error("`{field}` is {found}; it must be from 1 to {limit}", limit = super::ModelConfig::MAX_SIZE)]
    Size {
        /// The field.
        field: &'static str,
        /// The value.
        found: usize,
    },
    /// No `head_dim`, and heads that do not divide the hidden size.
    #[error(
        "`hidden_size` {hidden_size} is not a multiple of {heads} attention heads, and there is no `head_dim`"
    )]
    HeadDim {
        /// Features of the residual stream.
        hidden_size: usize,
        /// Query heads.
        heads: usize,
    },
    /// Key heads that do not divide query heads.
    #[error("`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}")]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key heads.
        kv_heads: usize,
    },
    /// A part of a head that rotary embedding cannot halve.
    #[error(
        "`head_dim` {head_dim} times `partial_rotary_factor` gives {rotary_dim} features to rotate; rotary embedding needs an even number from 2 to `head_dim`"
    )]
    RotaryDim {
        /// Features of one head.
        head_dim: usize,
        /// Those that are rotated.
        rotary_dim: usize,
    },
    /// A constant that must be positive and finite.
    #[error("`{field}` is {found}; it must be a positive number")]
    NotPositive {
        /// The field.
        field: &'static str,
        /// The value.
        found: f64,
    },
    /// Low frequencies above high ones.
    #[error("`rope_scaling.low_freq_factor` {low} must be below `high_freq_factor` {high}")]
    FrequencyFactors {
        /// `low_freq_factor`.
        low: f64,
        /// `high_freq_factor`.
        high: f64,
    },
}
