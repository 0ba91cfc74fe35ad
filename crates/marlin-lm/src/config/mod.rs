//! The `config.json` of a Llama-style decoder.

mod error;
mod experts;
mod generation;
mod raw;
mod raw_rope;
mod rope;
mod sizes;

use std::io::ErrorKind;
use std::path::Path;

use burn::tensor::FloatDType;
use marlin_format::checkpoint::{MAX_CONFIG_BYTES, read_text};
use serde::{Deserialize, Serialize};

pub use error::ModelConfigError;
pub use experts::ExpertsConfig;
pub use generation::GenerationConfig;
pub(crate) use generation::{quantization_field, read_json};
use raw::{RawClass, RawConfig};
pub use rope::{Llama3RopeScaling, LongRopeScaling, RopeScaling, YarnRopeScaling};
pub use sizes::ModelSizes;

use crate::ModelError;
use crate::architectures::{Architecture, BlockShape, LayerShape, Window};

/// The sizes and constants of a Llama-style decoder, as in its `config.json`.
///
/// The type serialises to and from the JSON of this file. Reading accepts the fields that old and
/// new versions of Hugging Face's config class of the [`Architecture`] write: `rope_scaling` or
/// `rope_parameters` (of both, the first counts), `torch_dtype` or `dtype`, one end-of-sequence id
/// or several. Absent fields have the defaults of that class.
///
/// ```
/// use marlin_lm::ModelConfig;
///
/// let config = ModelConfig::from_json(r#"{
///     "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768,
///     "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true
/// }"#)?;
/// assert_eq!(config.head_dim, 64);
/// # Ok::<(), marlin_lm::ModelConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawConfig", into = "RawConfig")]
pub struct ModelConfig {
    /// The architecture of the model.
    pub architecture: Architecture,
    /// The number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// The number of features of the residual stream.
    pub hidden_size: usize,
    /// The number of features between the gate and up projections and the down projection of an
    /// MLP.
    pub intermediate_size: usize,
    /// The experts of a mixture; `None` if every layer has one MLP.
    pub experts: Option<ExpertsConfig>,
    /// The number of transformer blocks.
    pub num_hidden_layers: usize,
    /// The number of query heads.
    pub num_attention_heads: usize,
    /// The number of key and value heads; each serves `num_attention_heads / num_key_value_heads`
    /// query heads.
    pub num_key_value_heads: usize,
    /// The number of features of one head.
    pub head_dim: usize,
    /// The constant that is added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// The scaling of the rotary frequencies for long contexts.
    pub rope_scaling: Option<RopeScaling>,
    /// The fraction of each head that is rotated, from its first feature on; 1 in most models.
    pub partial_rotary_factor: f64,
    /// The sliding window, and the layers that have it; `None` if every layer attends to all
    /// positions before.
    pub sliding_window: Option<SlidingWindow>,
    /// The number of positions that the model was made for.
    pub max_position_embeddings: usize,
    /// True if the embedding is also the output head.
    pub tie_word_embeddings: bool,
    /// True if the q, k and v projections have biases; in Llama and Qwen 3 also the o projection.
    pub attention_bias: bool,
    /// True if the gate, up and down projections have biases.
    pub mlp_bias: bool,
    /// The token that starts a text.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// The dtype in which the weights are published, if it is f16, bf16 or f32.
    pub dtype: Option<FloatDType>,
}

/// A sliding window: attention to the last positions only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingWindow {
    /// The number of positions that a query attends to, including its own.
    pub size: usize,
    /// The layers with a window; other layers attend to all positions before.
    pub layers: WindowLayers,
}

/// The layers that have a sliding window, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowLayers {
    /// The layers from this one on.
    From(usize),
    /// The layers with an even number.
    Even,
}

impl WindowLayers {
    /// Returns true if a layer has a window.
    pub fn contains(self, layer: usize) -> bool {
        match self {
            Self::From(first) => layer >= first,
            Self::Even => layer.is_multiple_of(2),
        }
    }

    /// Returns how many of the first `layers` layers have a window.
    pub fn count(self, layers: usize) -> usize {
        match self {
            Self::From(first) => layers.saturating_sub(first),
            Self::Even => layers.div_ceil(2),
        }
    }
}

/// The name that PEFT gives the config of a LoRA adapter.
const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";

impl ModelConfig {
    /// The largest value of any size field; a larger value means a broken file.
    pub const MAX_SIZE: usize = 1 << 30;

    /// Reads the JSON of a `config.json`.
    ///
    /// # Errors
    /// [`ModelConfigError`] for text that is not the JSON of a config, for another architecture,
    /// for options that are not supported, and as in [`validate`](Self::validate).
    pub fn from_json(text: &str) -> Result<Self, ModelConfigError> {
        // The architecture is checked before the fields: another architecture has other fields.
        serde_json::from_str::<RawClass>(text)?.architecture()?;
        serde_json::from_str::<RawConfig>(text)?.try_into()
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`ModelError::Io`], [`ModelError::Adapter`], or [`ModelError::Config`] with the file's name
    /// and the cause as in [`from_json`](Self::from_json).
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let text = read_text(path, MAX_CONFIG_BYTES).map_err(|source| match path.parent() {
            Some(dir)
                if source.kind() == ErrorKind::NotFound
                    && dir.join(ADAPTER_CONFIG_FILE).exists() =>
            {
                ModelError::Adapter { dir: dir.into() }
            }
            _ => ModelError::io("read", path, source),
        })?;
        Self::from_json(&text).map_err(|source| ModelError::Config {
            path: path.into(),
            source,
        })
    }

    /// Returns the JSON of a `config.json`.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(RawConfig::from(self.clone())).unwrap_or_default()
    }

    /// Checks that sizes and constants fit together.
    ///
    /// # Errors
    /// Returns a [`ModelConfigError`] that names the field.
    pub fn validate(&self) -> Result<(), ModelConfigError> {
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
        sizes
            .into_iter()
            .try_for_each(|(field, found)| size(field, found))?;
        if let Some(experts) = &self.experts {
            experts.validate()?;
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(ModelConfigError::Heads { heads, kv_heads });
        }
        size(
            "num_attention_heads * head_dim",
            heads.saturating_mul(self.head_dim),
        )?;
        positive("rms_norm_eps", self.rms_norm_eps)?;
        positive("rope_theta", self.rope_theta)?;
        positive("partial_rotary_factor", self.partial_rotary_factor)?;
        let rotary_dim = self.rotary_dim();
        if rotary_dim == 0 || rotary_dim > self.head_dim || !rotary_dim.is_multiple_of(2) {
            return Err(ModelConfigError::RotaryDim {
                head_dim: self.head_dim,
                rotary_dim,
            });
        }
        if let Some(scaling) = &self.rope_scaling {
            scaling.validate(self)?;
            // A config that is written with another scaling could not be read.
            if !self.architecture.declaration().rope.reads(scaling) {
                let found = scaling.rope_type().into();
                return Err(ModelConfigError::NotOfArchitecture {
                    field: "rope_type",
                    found,
                    architecture: self.architecture,
                });
            }
        }
        self.validate_for_architecture()
    }

    /// Checks that the architecture has the features that the config asks for.
    fn validate_for_architecture(&self) -> Result<(), ModelConfigError> {
        let declaration = self.architecture.declaration();
        let other = |field, found: String| {
            Err(ModelConfigError::NotOfArchitecture {
                field,
                found,
                architecture: self.architecture,
            })
        };
        if !declaration.attention_bias.allows(self.attention_bias) {
            return other("attention_bias", self.attention_bias.to_string());
        }
        if !declaration.mlp_bias.allows(self.mlp_bias) {
            return other("mlp_bias", self.mlp_bias.to_string());
        }
        let Some(window) = self.sliding_window else {
            return Ok(());
        };
        size("sliding_window", window.size)?;
        match declaration.window {
            Window::None => other("sliding_window", window.size.to_string()),
            Window::AllLayers if window.layers != WindowLayers::From(0) => {
                other("max_window_layers", format!("{:?}", window.layers))
            }
            Window::UpperLayers if window.layers == WindowLayers::Even => {
                other("layer_types", "a window in every other layer".into())
            }
            Window::EvenLayers if window.layers != WindowLayers::Even => {
                other("layer_types", format!("{:?}", window.layers))
            }
            Window::AllLayers | Window::UpperLayers | Window::EvenLayers => Ok(()),
        }
    }

    /// Returns the number of positions that the model supports: `max_position_embeddings`, or
    /// YaRN's stretched context if that is longer, as in a config whose field still has the
    /// original context.
    pub fn positions(&self) -> usize {
        let stretched = match &self.rope_scaling {
            Some(RopeScaling::Yarn(scaling)) => {
                (scaling.original_max_position_embeddings as f64 * scaling.factor) as usize
            }
            _ => 0,
        };
        self.max_position_embeddings
            .max(stretched.min(Self::MAX_SIZE))
    }

    /// Returns the number of features of each head that are rotated.
    pub fn rotary_dim(&self) -> usize {
        (self.head_dim as f64 * self.partial_rotary_factor) as usize
    }

    /// Returns the number of positions that a query of a layer attends to, including its own;
    /// `None` for all positions before.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.sliding_window
            .filter(|window| window.layers.contains(layer))
            .map(|window| window.size)
    }

    /// Returns the shape of block `layer`.
    pub(crate) fn block(&self, layer: usize) -> BlockShape {
        (self.architecture.declaration().block)(self, layer)
    }

    /// Returns the output head as a layer of a checkpoint; `None` if it is tied to the embedding.
    pub(crate) fn head(&self) -> Option<LayerShape> {
        (!self.tie_word_embeddings).then(|| self.untied_head())
    }

    /// Returns the output head that the model has if it is not the embedding.
    pub(crate) fn untied_head(&self) -> LayerShape {
        LayerShape {
            name: "lm_head".into(),
            dims: [self.hidden_size, self.vocab_size],
            bias: false,
            is_float: false,
            stack: None,
            part: None,
        }
    }

    /// Returns the number of features of all query heads together: N of `q_proj`, K of `o_proj`.
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Returns the number of features of all key heads together: N of `k_proj` and `v_proj`.
    pub fn key_value_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }
}

/// Checks that a size is from 1 to [`ModelConfig::MAX_SIZE`].
fn size(field: &'static str, found: usize) -> Result<(), ModelConfigError> {
    if (1..=ModelConfig::MAX_SIZE).contains(&found) {
        Ok(())
    } else {
        Err(ModelConfigError::Size { field, found })
    }
}

fn positive(field: &'static str, found: f64) -> Result<(), ModelConfigError> {
    if found.is_finite() && found > 0.0 {
        Ok(())
    } else {
        Err(ModelConfigError::NotPositive { field, found })
    }
}

#[cfg(test)]
mod tests;
