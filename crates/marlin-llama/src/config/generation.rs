//! `generation_config.json`, and the quantisation in `config.json`.

use std::io::ErrorKind;
use std::path::Path;

use marlin_format::checkpoint::{MAX_CONFIG_BYTES, Quantization, read_file};
use serde::Deserialize;
use serde_json::Value;

use super::LlamaConfig;
use super::raw::TokenIds;
use crate::LlamaError;
use crate::sampling::Sampling;

/// The generation settings of a model's makers.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// The choice of the next token.
    pub sampling: Sampling,
    /// The tokens that end a text.
    pub eos_token_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct RawGeneration {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    repetition_penalty: Option<f32>,
    eos_token_id: Option<TokenIds>,
}

/// The default of Hugging Face's `generate` if `top_k` is not given.
const DEFAULT_TOP_K: usize = 50;

impl GenerationConfig {
    /// Reads a `generation_config.json`, with Hugging Face's defaults for absent fields: without `do_sample` the most likely token is taken.
    /// If there is no such file, or it names no end-of-sequence token, those of `config` count.
    ///
    /// # Errors
    /// [`LlamaError::Io`], [`LlamaError::Json`], and [`LlamaError::GenerationConfig`] for options outside their range.
    pub fn read(path: &Path, config: &LlamaConfig) -> Result<Self, LlamaError> {
        let text = match read_file(path, MAX_CONFIG_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Self { sampling: Sampling::GREEDY, eos_token_ids: config.eos_token_ids.clone() });
            }
            Err(source) => return Err(LlamaError::io("read", path, source)),
        };
        let raw: RawGeneration = serde_json::from_slice(&text).map_err(|source| LlamaError::Json { path: path.into(), source })?;
        let repetition_penalty = raw.repetition_penalty.unwrap_or(1.0);
        let sampling = if raw.do_sample.unwrap_or(false) {
            Sampling {
                temperature: raw.temperature.unwrap_or(1.0),
                top_k: Some(raw.top_k.unwrap_or(DEFAULT_TOP_K)).filter(|&k| k > 0),
                top_p: raw.top_p.unwrap_or(1.0),
                repetition_penalty,
            }
        } else {
            Sampling { repetition_penalty, ..Sampling::GREEDY }
        };
        sampling.validate().map_err(|source| LlamaError::GenerationConfig { path: path.into(), source })?;
        let eos_token_ids = raw.eos_token_id.map_or_else(|| config.eos_token_ids.clone(), TokenIds::into_vec);
        Ok(Self { sampling, eos_token_ids })
    }
}

/// The field of a `config.json` with the quantisation of weights.
pub(crate) fn quantization_field(config: &Value) -> Option<&Value> {
    Quantization::CONFIG_FIELDS.iter().filter_map(|field| config.get(field)).find(|value| !value.is_null())
}

/// A file as JSON.
pub(crate) fn read_json(path: &Path) -> Result<Value, LlamaError> {
    let text = read_file(path, MAX_CONFIG_BYTES).map_err(|source| LlamaError::io("read", path, source))?;
    serde_json::from_slice(&text).map_err(|source| LlamaError::Json { path: path.into(), source })
}
