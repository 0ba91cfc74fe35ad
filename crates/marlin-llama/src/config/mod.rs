//! The `config.json` of a Llama.

mod error;
mod generation;
mod raw;

use std::path::Path;

use burn::tensor::FloatDType;
use serde::{Deserialize, Serialize};

pub use error::LlamaConfigError;
pub use generation::GenerationConfig;
pub(crate) use generation::{quantization_field, read_json, read_quantization_config};
use raw::RawConfig;

use crate::LlamaError;

/// The architecture this crate reads, by its name in `config.json`.
pub const ARCHITECTURE: &str = "LlamaForCausalLM";

/// Sizes and constants of a Llama 2 or 3 model, as `config.json` holds them.
///
/// Serialises to and from that file's JSON. Reading accepts what Hugging Face's `LlamaConfig` writes, old and new: `rope_scaling` or
/// `rope_parameters`, `torch_dtype` or `dtype`, one end-of-sequence id or several. What is left out has the same default as there.
///
/// ```
/// use marlin_llama::LlamaConfig;
///
/// let config = LlamaConfig::from_json(r#"{
///     "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768,
///     "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true
/// }"#)?;
/// assert_eq!(config.head_dim, 64);
/// # Ok::<(), marlin_llama::LlamaConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawConfig", into = "RawConfig")]
pub struct LlamaConfig {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Features of the residual stream.
    pub hidden_size: usize,
    /// Features between the two halves of an MLP.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub num_hidden_layers: usize,
    /// Heads of the queries.
    pub num_attention_heads: usize,
    /// Heads of the keys and values; each serves `num_attention_heads / num_key_value_heads` heads of the queries.
    pub num_key_value_heads: usize,
    /// Features of one head.
    pub head_dim: usize,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How the rotary frequencies are stretched for long contexts.
    pub rope_scaling: Option<Llama3RopeScaling>,
    /// Positions the model was made for.
    pub max_position_embeddings: usize,
    /// Whether the embedding is the output head, too.
    pub tie_word_embeddings: bool,
    /// Whether q, k, v and o projections have a bias.
    pub attention_bias: bool,
    /// Whether gate, up and down projections have a bias.
    pub mlp_bias: bool,
    /// The token that starts a text.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// The dtype that the weights are published in, where it is f16, bf16 or f32.
    pub dtype: Option<FloatDType>,
}

/// The rotary scaling of Llama 3.1 and later (`rope_type: llama3`): low frequencies are divided by `factor`, high ones kept, and those between
/// interpolated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Llama3RopeScaling {
    /// What low frequencies are divided by.
    pub factor: f64,
    /// Wavelengths above `original_max_position_embeddings / low_freq_factor` positions are low frequencies.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_max_position_embeddings / high_freq_factor` positions are high frequencies.
    pub high_freq_factor: f64,
    /// Positions of the context before it was stretched.
    pub original_max_position_embeddings: usize,
}

impl LlamaConfig {
    /// The largest size of any field: everything above is a broken file, not a model.
    pub const MAX_SIZE: usize = 1 << 30;

    /// Reads the JSON of a `config.json`.
    ///
    /// # Errors
    /// [`LlamaConfigError`] for text that is not such JSON, another architecture, options that are not supported, and as
    /// [`validate`](Self::validate).
    pub fn from_json(text: &str) -> Result<Self, LlamaConfigError> {
        serde_json::from_str::<RawConfig>(text)?.try_into()
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`LlamaError::Io`], or [`LlamaError::Config`] with the file's name and what is wrong as in [`from_json`](Self::from_json).
    pub fn read(path: &Path) -> Result<Self, LlamaError> {
        let text = std::fs::read_to_string(path).map_err(|source| LlamaError::io("read", path, source))?;
        Self::from_json(&text).map_err(|source| LlamaError::Config { path: path.into(), source })
    }

    /// The JSON of a `config.json`.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(RawConfig::from(self.clone())).unwrap_or_default()
    }

    /// Whether sizes and constants fit together.
    ///
    /// # Errors
    /// A [`LlamaConfigError`] that names the field.
    pub fn validate(&self) -> Result<(), LlamaConfigError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        for (field, found) in sizes {
            if found == 0 || found > Self::MAX_SIZE {
                return Err(LlamaConfigError::Size { field, found });
            }
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(LlamaConfigError::Heads { heads, kv_heads });
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(LlamaConfigError::OddHeadDim { head_dim: self.head_dim });
        }
        if heads.saturating_mul(self.head_dim) > Self::MAX_SIZE {
            return Err(LlamaConfigError::Size { field: "num_attention_heads * head_dim", found: heads.saturating_mul(self.head_dim) });
        }
        positive("rms_norm_eps", self.rms_norm_eps)?;
        positive("rope_theta", self.rope_theta)?;
        if let Some(scaling) = &self.rope_scaling {
            positive("rope_scaling.factor", scaling.factor)?;
            positive("rope_scaling.low_freq_factor", scaling.low_freq_factor)?;
            positive("rope_scaling.high_freq_factor", scaling.high_freq_factor)?;
            let found = scaling.original_max_position_embeddings;
            if found == 0 || found > Self::MAX_SIZE {
                return Err(LlamaConfigError::Size { field: "rope_scaling.original_max_position_embeddings", found });
            }
            if scaling.low_freq_factor >= scaling.high_freq_factor {
                return Err(LlamaConfigError::FrequencyFactors { low: scaling.low_freq_factor, high: scaling.high_freq_factor });
            }
        }
        Ok(())
    }

    /// Features of all query heads together: N of `q_proj`, K of `o_proj`.
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Features of all key heads together: N of `k_proj` and `v_proj`.
    pub fn key_value_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }
}

fn positive(field: &'static str, found: f64) -> Result<(), LlamaConfigError> {
    if found.is_finite() && found > 0.0 { Ok(()) } else { Err(LlamaConfigError::NotPositive { field, found }) }
}

#[cfg(test)]
mod tests;
