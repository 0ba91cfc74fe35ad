//! The JSON fields of a `config.json`, and their conversion to a `ModelConfig`.

use burn::tensor::FloatDType;
use marlin_kernels::Epilogue;
use serde::{Deserialize, Deserializer, Serialize};

use super::experts::RawExperts;
use super::raw_rope::{RawRope, Rope, TopLevelFields};
use super::{ModelConfig, ModelConfigError, RopeScaling, SlidingWindow, WindowLayers};
use crate::architectures::{Architecture, Bias, Window};

const ACTIVATION: &str = "silu";

/// The fields of a `config.json` that name the model's class; all other fields are ignored.
#[derive(Deserialize)]
pub(super) struct RawClass {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
}

/// The fields of a `config.json`, with every spelling that is read. Absent fields get the defaults
/// of Hugging Face's config class.
#[derive(Serialize, Deserialize)]
pub(super) struct RawConfig {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    #[serde(flatten)]
    experts: RawExperts,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    /// The number of key and value heads. An absent field means the class's default, `null` means
    /// the number of query heads.
    #[serde(default, deserialize_with = "present")]
    num_key_value_heads: Option<Option<usize>>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rope_parameters: Option<RawRope>,
    #[serde(skip_serializing_if = "Option::is_none")]
    partial_rotary_factor: Option<f64>,
    max_position_embeddings: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_max_position_embeddings: Option<usize>,
    /// The size of the sliding window. An absent field means the class's default, `null` means no
    /// window.
    #[serde(
        default,
        deserialize_with = "present",
        skip_serializing_if = "Option::is_none"
    )]
    sliding_window: Option<Option<usize>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    use_sliding_window: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_window_layers: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    layer_types: Option<Vec<String>>,
    tie_word_embeddings: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_bias: Option<bool>,
    /// True if the o projection of Seed-OSS has a bias.
    #[serde(skip_serializing)]
    attention_out_bias: Option<bool>,
    /// The biases of q, k and v in Qwen 2's mixtures.
    #[serde(skip_serializing)]
    qkv_bias: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mlp_bias: Option<bool>,
    /// The largest gates and ups of gpt-oss.
    #[serde(skip_serializing)]
    swiglu_limit: Option<f64>,
    /// The factor of gates in the sigmoid of gpt-oss.
    #[serde(skip_serializing)]
    swiglu_alpha: Option<f64>,
    bos_token_id: Option<TokenIds>,
    eos_token_id: Option<TokenIds>,
    torch_dtype: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<String>,
}

/// Deserialises a field that is present, whether or not it is `null`.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<usize>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// A token id, or a list of them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    pub(crate) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

impl TryFrom<RawConfig> for ModelConfig {
    type Error = ModelConfigError;

    fn try_from(raw: RawConfig) -> Result<Self, ModelConfigError> {
        let architecture = RawClass {
            architectures: raw.architectures,
            model_type: raw.model_type,
        }
        .architecture()?;
        let declaration = architecture.declaration();
        let defaults = &declaration.defaults;
        if let Some(found) = raw.hidden_act.filter(|activation| activation != ACTIVATION) {
            return Err(ModelConfigError::Unsupported {
                field: "hidden_act",
                found,
                expected: ACTIVATION,
            });
        }
        for (field, found, constant, expected) in [
            (
                "swiglu_limit",
                raw.swiglu_limit,
                Epilogue::CLAMPED_LIMIT,
                "7",
            ),
            (
                "swiglu_alpha",
                raw.swiglu_alpha,
                Epilogue::CLAMPED_SLOPE,
                "1.702",
            ),
        ] {
            if let Some(found) = found.filter(|&found| found as f32 != constant) {
                return Err(ModelConfigError::Unsupported {
                    field,
                    found: found.to_string(),
                    expected,
                });
            }
        }
        if raw.qkv_bias == Some(false) && declaration.attention_bias == Bias::Always {
            return Err(ModelConfigError::Unsupported {
                field: "qkv_bias",
                found: "false".into(),
                expected: "true",
            });
        }
        if raw.attention_out_bias == Some(true) && architecture == Architecture::SeedOss {
            return Err(ModelConfigError::Unsupported {
                field: "attention_out_bias",
                found: "true".into(),
                expected: "false",
            });
        }
        let heads = raw.num_attention_heads;
        let head_dim = match raw.head_dim.or(defaults.head_dim) {
            Some(head_dim) => head_dim,
            None if heads == 0 => {
                return Err(ModelConfigError::Size {
                    field: "num_attention_heads",
                    found: 0,
                });
            }
            None if raw.hidden_size.is_multiple_of(heads) => raw.hidden_size / heads,
            None => {
                return Err(ModelConfigError::HeadDim {
                    hidden_size: raw.hidden_size,
                    heads,
                });
            }
        };
        let window = raw.sliding_window.unwrap_or(defaults.sliding_window);
        let sliding_window = match declaration.window {
            Window::None => None,
            Window::AllLayers => window.map(|size| SlidingWindow {
                size,
                layers: WindowLayers::From(0),
            }),
            Window::EvenLayers => window.map(|size| SlidingWindow {
                size,
                layers: WindowLayers::Even,
            }),
            Window::UpperLayers => {
                let first = raw.max_window_layers.unwrap_or(defaults.max_window_layers);
                let layers = WindowLayers::From(first);
                window
                    .filter(|_| raw.use_sliding_window.unwrap_or(false))
                    .map(|size| SlidingWindow { size, layers })
            }
        };
        let max_position_embeddings = raw
            .max_position_embeddings
            .unwrap_or(defaults.max_position_embeddings);
        let beside = TopLevelFields {
            fields: declaration.rope,
            rope_theta: raw.rope_theta,
            default_rope_theta: defaults.rope_theta,
            partial_rotary_factor: raw.partial_rotary_factor,
            original_max_position_embeddings: raw
                .original_max_position_embeddings
                .or(defaults.original_max_position_embeddings),
            max_position_embeddings,
        };
        let rope = RawRope::choose(raw.rope_scaling, raw.rope_parameters, &beside);
        let default_scaling = defaults.yarn.filter(|_| rope.is_none());
        let Rope {
            theta,
            partial_rotary_factor,
            scaling,
        } = rope.unwrap_or_default().read(&beside)?;
        let scaling = scaling.or(default_scaling.map(RopeScaling::Yarn));
        let config = Self {
            architecture,
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            experts: raw
                .experts
                .read(&declaration.experts, raw.intermediate_size),
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: heads,
            num_key_value_heads: raw
                .num_key_value_heads
                .unwrap_or(defaults.num_key_value_heads)
                .unwrap_or(heads),
            head_dim,
            rms_norm_eps: raw.rms_norm_eps.unwrap_or(defaults.rms_norm_eps),
            rope_theta: theta,
            partial_rotary_factor,
            rope_scaling: scaling,
            max_position_embeddings,
            sliding_window,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            attention_bias: declaration.attention_bias.resolve(raw.attention_bias),
            mlp_bias: declaration.mlp_bias.resolve(raw.mlp_bias),
            bos_token_id: raw
                .bos_token_id
                .and_then(|ids| ids.into_vec().first().copied()),
            eos_token_ids: raw.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
            dtype: raw
                .dtype
                .or(raw.torch_dtype)
                .and_then(|name| parse_dtype(&name)),
        };
        config.validate()?;
        config.check_layer_types(raw.layer_types.as_deref().unwrap_or_default())?;
        Ok(config)
    }
}

impl ModelConfig {
    /// Checks that `layer_types` agrees with the fields that it follows from; newer files have
    /// both.
    fn check_layer_types(&self, types: &[String]) -> Result<(), ModelConfigError> {
        for (layer, found) in types.iter().enumerate() {
            let expected = if self.window_of(layer).is_some() {
                "sliding_attention"
            } else {
                "full_attention"
            };
            if found != expected {
                return Err(ModelConfigError::LayerType {
                    layer,
                    found: found.clone(),
                    expected,
                });
            }
        }
        Ok(())
    }
}

impl From<ModelConfig> for RawConfig {
    fn from(config: ModelConfig) -> Self {
        let declaration = config.architecture.declaration();
        let upper_layers = declaration.window == Window::UpperLayers;
        let window = config.sliding_window;
        Self {
            architectures: Some(vec![declaration.class.into()]),
            model_type: Some(declaration.model_type.into()),
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            experts: RawExperts::of(config.experts.as_ref(), &declaration.experts),
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: Some(Some(config.num_key_value_heads)),
            head_dim: Some(config.head_dim),
            hidden_act: Some(ACTIVATION.into()),
            rms_norm_eps: Some(config.rms_norm_eps),
            rope_theta: Some(config.rope_theta),
            original_max_position_embeddings: match &config.rope_scaling {
                Some(RopeScaling::LongRope(scaling)) => {
                    Some(scaling.original_max_position_embeddings)
                }
                Some(RopeScaling::Llama3(_) | RopeScaling::Yarn(_)) | None => None,
            },
            rope_scaling: match config.rope_scaling {
                Some(scaling) => Some(scaling.into()),
                None => declaration.defaults.yarn.map(|_| RawRope::unscaled()),
            },
            rope_parameters: None,
            partial_rotary_factor: Some(config.partial_rotary_factor)
                .filter(|&factor| factor != 1.0),
            max_position_embeddings: Some(config.max_position_embeddings),
            sliding_window: (declaration.window != Window::None)
                .then(|| window.map(|window| window.size)),
            use_sliding_window: upper_layers.then_some(window.is_some()),
            max_window_layers: match window.map(|window| window.layers) {
                Some(WindowLayers::From(first)) if upper_layers => Some(first),
                _ => None,
            },
            layer_types: None,
            tie_word_embeddings: Some(config.tie_word_embeddings),
            attention_bias: matches!(
                declaration.attention_bias,
                Bias::Config | Bias::UnlessConfig
            )
            .then_some(config.attention_bias),
            attention_out_bias: None,
            qkv_bias: None,
            mlp_bias: (declaration.mlp_bias == Bias::Config).then_some(config.mlp_bias),
            swiglu_limit: None,
            swiglu_alpha: None,
            bos_token_id: config.bos_token_id.map(TokenIds::One),
            eos_token_id: match config.eos_token_ids.as_slice() {
                [] => None,
                [id] => Some(TokenIds::One(*id)),
                _ => Some(TokenIds::Many(config.eos_token_ids)),
            },
            torch_dtype: config.dtype.and_then(dtype_name).map(String::from),
            dtype: None,
        }
    }
}

impl RawClass {
    pub(super) fn architecture(&self) -> Result<Architecture, ModelConfigError> {
        let classes = self.architectures.as_deref().unwrap_or_default();
        Architecture::find(classes, self.model_type.as_deref()).ok_or_else(|| {
            let found = match (classes, &self.model_type) {
                ([], Some(model_type)) => model_type.clone(),
                ([], None) => "not named".into(),
                (classes, _) => classes.join(", "),
            };
            ModelConfigError::Architecture { found }
        })
    }
}

fn parse_dtype(name: &str) -> Option<FloatDType> {
    match name.strip_prefix("torch.").unwrap_or(name) {
        "float16" => Some(FloatDType::F16),
        "bfloat16" => Some(FloatDType::BF16),
        "float32" => Some(FloatDType::F32),
        _ => None,
    }
}

fn dtype_name(dtype: FloatDType) -> Option<&'static str> {
    match dtype {
        FloatDType::F16 => Some("float16"),
        FloatDType::BF16 => Some("bfloat16"),
        FloatDType::F32 => Some("float32"),
        FloatDType::F64 | FloatDType::Flex32 => None,
    }
}
