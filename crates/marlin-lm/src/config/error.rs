use crate::architectures::Architecture;

/// A `config.json` that does not describe a supported model, or contradicts itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelConfigError {
    /// A text that is not JSON, a required field that is absent, or a field of another type.
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
    /// A `layer_types` that contradicts the other fields of the sliding window.
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
        /// The cause.
        source: serde_json::Error,
    },
    /// A field of the rotary scaling that changes logits, but is not supported.
    #[error("`{}` of the rotary scaling is {}; this version does not compute with it, and the logits would be others", field.escape_debug(), found.escape_debug())]
    UnreadRopeField {
        /// The field.
        field: String,
        /// The value of the field, as JSON.
        found: String,
    },
    /// A list of rotary factors whose length is not the number of frequencies.
    #[error(
        "`{field}` has {found} numbers; there are {expected} frequencies, half of the rotated features of a head"
    )]
    RopeFactors {
        /// The field.
        field: &'static str,
        /// The number of frequencies.
        expected: usize,
        /// The length of the list.
        found: usize,
    },
    /// A size that is 0 or above [`MAX_SIZE`](super::ModelConfig::MAX_SIZE).
    #[error("`{field}` is {found}; it must be from 1 to {limit}", limit = super::ModelConfig::MAX_SIZE)]
    Size {
        /// The field.
        field: &'static str,
        /// The value.
        found: usize,
    },
    /// An absent `head_dim`, and a number of heads that does not divide the hidden size.
    #[error(
        "`hidden_size` {hidden_size} is not a multiple of {heads} attention heads, and there is no `head_dim`"
    )]
    HeadDim {
        /// The number of features of the residual stream.
        hidden_size: usize,
        /// The number of query heads.
        heads: usize,
    },
    /// A number of key heads that does not divide the number of query heads.
    #[error("`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}")]
    Heads {
        /// The number of query heads.
        heads: usize,
        /// The number of key heads.
        kv_heads: usize,
    },
    /// A number of rotated features that is odd, 0, or above `head_dim`.
    #[error(
        "`head_dim` {head_dim} times `partial_rotary_factor` gives {rotary_dim} features to rotate; rotary embedding needs an even number from 2 to `head_dim`"
    )]
    RotaryDim {
        /// The number of features of one head.
        head_dim: usize,
        /// The number of features that are rotated.
        rotary_dim: usize,
    },
    /// Numbers of experts that no kernel computes: a token with none, or with more than there are.
    #[error("the numbers of experts do not fit: {0}")]
    Experts(marlin_kernels::KernelError),
    /// A constant that must be positive and finite.
    #[error("`{field}` is {found}; it must be a positive number")]
    NotPositive {
        /// The field.
        field: &'static str,
        /// The value.
        found: f64,
    },
    /// A `low_freq_factor` that is not below `high_freq_factor`.
    #[error("`rope_scaling.low_freq_factor` {low} must be below `high_freq_factor` {high}")]
    FrequencyFactors {
        /// The value of `low_freq_factor`.
        low: f64,
        /// The value of `high_freq_factor`.
        high: f64,
    },
}
