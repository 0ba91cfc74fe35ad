//! The JSON as it is written, and its meaning.

use burn::tensor::FloatDType;
use serde::{Deserialize, Serialize};

use super::{ARCHITECTURE, Llama3RopeScaling, LlamaConfig, LlamaConfigError};

const MODEL_TYPE: &str = "llama";
const ACTIVATION: &str = "silu";

/// `config.json` with every spelling that is read. Absent fields get the defaults of Hugging Face's `LlamaConfig`.
#[derive(Serialize, Deserialize)]
pub(super) struct RawConfig {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rope_parameters: Option<RawRope>,
    max_position_embeddings: Option<usize>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    bos_token_id: Option<TokenIds>,
    eos_token_id: Option<TokenIds>,
    torch_dtype: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<String>,
}

/// `rope_scaling`, or the newer `rope_parameters`, which holds the base as well.
#[derive(Serialize, Deserialize)]
struct RawRope {
    rope_type: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    old_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
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

impl TryFrom<RawConfig> for LlamaConfig {
    type Error = LlamaConfigError;

    fn try_from(raw: RawConfig) -> Result<Self, LlamaConfigError> {
        check_architecture(&raw)?;
        if let Some(found) = raw.hidden_act.filter(|activation| activation != ACTIVATION) {
            return Err(LlamaConfigError::Unsupported { field: "hidden_act", found, expected: ACTIVATION });
        }
        let heads = raw.num_attention_heads;
        let head_dim = match raw.head_dim {
            Some(head_dim) => head_dim,
            None if heads == 0 => return Err(LlamaConfigError::Size { field: "num_attention_heads", found: 0 }),
            None if raw.hidden_size.is_multiple_of(heads) => raw.hidden_size / heads,
            None => return Err(LlamaConfigError::HeadDim { hidden_size: raw.hidden_size, heads }),
        };
        let rope = raw.rope_parameters.or(raw.rope_scaling);
        let rope_theta = rope.as_ref().and_then(|rope| rope.rope_theta).or(raw.rope_theta).unwrap_or(10_000.0);
        let config = Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_hidden_layers: raw.num_hidden_layers,
            num_attention_heads: heads,
            num_key_value_heads: raw.num_key_value_heads.unwrap_or(heads),
            head_dim,
            rms_norm_eps: raw.rms_norm_eps.unwrap_or(1e-6),
            rope_theta,
            rope_scaling: rope.map(RawRope::scaling).transpose()?.flatten(),
            max_position_embeddings: raw.max_position_embeddings.unwrap_or(2048),
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            attention_bias: raw.attention_bias.unwrap_or(false),
            mlp_bias: raw.mlp_bias.unwrap_or(false),
            bos_token_id: raw.bos_token_id.and_then(|ids| ids.into_vec().first().copied()),
            eos_token_ids: raw.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
            dtype: raw.dtype.or(raw.torch_dtype).and_then(|name| parse_dtype(&name)),
        };
        config.validate()?;
        Ok(config)
    }
}

impl From<LlamaConfig> for RawConfig {
    fn from(config: LlamaConfig) -> Self {
        Self {
            architectures: Some(vec![ARCHITECTURE.into()]),
            model_type: Some(MODEL_TYPE.into()),
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: Some(config.num_key_value_heads),
            head_dim: Some(config.head_dim),
            hidden_act: Some(ACTIVATION.into()),
            rms_norm_eps: Some(config.rms_norm_eps),
            rope_theta: Some(config.rope_theta),
            rope_scaling: config.rope_scaling.map(RawRope::llama3),
            rope_parameters: None,
            max_position_embeddings: Some(config.max_position_embeddings),
            tie_word_embeddings: Some(config.tie_word_embeddings),
            attention_bias: Some(config.attention_bias),
            mlp_bias: Some(config.mlp_bias),
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

impl RawRope {
    fn scaling(self) -> Result<Option<Llama3RopeScaling>, LlamaConfigError> {
        let missing = |field| LlamaConfigError::MissingRopeField { field };
        match self.rope_type.or(self.old_type).as_deref() {
            None | Some("default") => Ok(None),
            Some("llama3") => Ok(Some(Llama3RopeScaling {
                factor: self.factor.ok_or(missing("factor"))?,
                low_freq_factor: self.low_freq_factor.ok_or(missing("low_freq_factor"))?,
                high_freq_factor: self.high_freq_factor.ok_or(missing("high_freq_factor"))?,
                original_max_position_embeddings: self
                    .original_max_position_embeddings
                    .ok_or(missing("original_max_position_embeddings"))?,
            })),
            Some(found) => Err(LlamaConfigError::Unsupported { field: "rope_type", found: found.into(), expected: "default or llama3" }),
        }
    }

    fn llama3(scaling: Llama3RopeScaling) -> Self {
        Self {
            rope_type: Some("llama3".into()),
            old_type: None,
            rope_theta: None,
            factor: Some(scaling.factor),
            low_freq_factor: Some(scaling.low_freq_factor),
            high_freq_factor: Some(scaling.high_freq_factor),
            original_max_position_embeddings: Some(scaling.original_max_position_embeddings),
        }
    }
}

/// `architectures` counts; where it is absent, `model_type` does.
fn check_architecture(raw: &RawConfig) -> Result<(), LlamaConfigError> {
    let found = match (&raw.architectures, &raw.model_type) {
        (Some(names), _) if names.iter().any(|name| name == ARCHITECTURE) => return Ok(()),
        (Some(names), _) if !names.is_empty() => names.join(", "),
        (_, Some(model_type)) if model_type == MODEL_TYPE => return Ok(()),
        (_, Some(model_type)) => model_type.clone(),
        (_, None) => "not named".into(),
    };
    Err(LlamaConfigError::Architecture { found })
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
