//! `generation_config.json`, and the quantisation in `config.json`.

use std::io::ErrorKind;
use std::path::Path;

use marlin_format::checkpoint::{MAX_CONFIG_BYTES, Quantization, read_file};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::ModelConfig;
use super::raw::TokenIds;
use crate::ModelError;
use crate::sampling::Sampling;
use crate::suppression::Suppression;

/// The generation settings that a model is published with.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// The choice of the next token.
    pub sampling: Sampling,
    /// Tokens that may not come next.
    pub suppression: Suppression,
    /// The tokens that end a text.
    pub eos_token_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct RawGeneration {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    /// Tokens that are never chosen; negative ids have no effect.
    suppress_tokens: Option<Vec<i64>>,
    bad_words_ids: Option<Vec<Vec<u32>>>,
    min_new_tokens: Option<usize>,
    min_length: Option<usize>,
    eos_token_id: Option<TokenIds>,
}

/// The default of Hugging Face's `generate` if `top_k` is not given.
const DEFAULT_TOP_K: usize = 50;

/// A field that is not applied, and a function that returns true for the numbers with which the
/// field has no effect.
type NotApplied = (&'static str, fn(f64) -> bool);

/// The fields of transformers' `GenerationConfig` (5.24) that change what is generated and are not
/// applied. `null`, `false`, empty lists and empty objects have no effect in any field.
///
/// The list omits `max_length` and `max_new_tokens`, which the caller's number of tokens replaces,
/// and the options of beam search, which count only with `num_beams` above 1. It also omits the
/// options of caches, outputs, padding and speculative decoding, which do not change the generated
/// tokens.
const NOT_APPLIED: [NotApplied; 24] = [
    ("begin_suppress_tokens", |_| false),
    ("constraints", |_| false),
    ("dola_layers", |_| false),
    ("encoder_no_repeat_ngram_size", |size| size <= 0.0),
    ("encoder_repetition_penalty", |penalty| penalty == 1.0),
    ("epsilon_cutoff", |cutoff| cutoff <= 0.0 || cutoff >= 1.0),
    ("eta_cutoff", |cutoff| cutoff <= 0.0 || cutoff >= 1.0),
    ("exponential_decay_length_penalty", |_| false),
    ("force_words_ids", |_| false),
    ("forced_bos_token_id", |_| false),
    ("forced_eos_token_id", |_| false),
    ("guidance_scale", |scale| scale == 1.0),
    ("max_time", |_| false),
    ("no_repeat_ngram_size", |size| size <= 0.0),
    ("num_beams", |beams| beams <= 1.0),
    ("num_return_sequences", |sequences| sequences <= 1.0),
    ("penalty_alpha", |alpha| alpha <= 0.0),
    ("remove_invalid_values", |_| false),
    ("sequence_bias", |_| false),
    ("stop_strings", |_| false),
    ("token_healing", |_| false),
    ("top_h", |_| false),
    ("typical_p", |p| p >= 1.0),
    ("watermarking_config", |_| false),
];

impl GenerationConfig {
    /// Reads a `generation_config.json`, with Hugging Face's defaults for absent fields: without
    /// `do_sample` the most likely token is taken. If the file does not exist or names no
    /// end-of-sequence token, the end-of-sequence tokens of `config` are used.
    ///
    /// Fields that change what transformers generates and are not applied here are named in a
    /// warning.
    ///
    /// # Errors
    /// [`ModelError::Io`], [`ModelError::Json`], and [`ModelError::GenerationConfig`] for options
    /// outside their range and empty bad words.
    pub fn read(path: &Path, config: &ModelConfig) -> Result<Self, ModelError> {
        let text = match read_file(path, MAX_CONFIG_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let (sampling, suppression) = (Sampling::GREEDY, Suppression::NONE);
                return Ok(Self {
                    sampling,
                    suppression,
                    eos_token_ids: config.eos_token_ids.clone(),
                });
            }
            Err(source) => return Err(ModelError::io("read", path, source)),
        };
        let json = |source| ModelError::Json {
            path: path.into(),
            source,
        };
        let raw: RawGeneration = serde_json::from_slice(&text).map_err(json)?;
        let fields = not_applied(&serde_json::from_slice(&text).map_err(json)?);
        if !fields.is_empty() {
            let (path, fields) = (path.display(), fields.join(", "));
            tracing::warn!(%path, %fields, "fields of the generation config that transformers applies and this version does not");
        }
        let repetition_penalty = raw.repetition_penalty.unwrap_or(1.0);
        let sampling = if raw.do_sample.unwrap_or(false) {
            Sampling {
                temperature: raw.temperature.unwrap_or(1.0),
                top_k: Some(raw.top_k.unwrap_or(DEFAULT_TOP_K)).filter(|&k| k > 0),
                top_p: raw.top_p.unwrap_or(1.0),
                min_p: raw.min_p.unwrap_or(0.0),
                repetition_penalty,
                ..Sampling::GREEDY
            }
        } else {
            Sampling {
                repetition_penalty,
                ..Sampling::GREEDY
            }
        };
        let suppress_tokens = raw.suppress_tokens.unwrap_or_default();
        let suppression = Suppression {
            suppress_tokens: suppress_tokens
                .into_iter()
                .filter_map(|token| token.try_into().ok())
                .collect(),
            bad_words_ids: raw.bad_words_ids.unwrap_or_default(),
            min_new_tokens: raw.min_new_tokens.unwrap_or(0),
            // `min_new_tokens` replaces `min_length`, even if it is 0.
            min_length: raw
                .min_length
                .filter(|_| raw.min_new_tokens.is_none())
                .unwrap_or(0),
        };
        let validated = sampling.validate().and_then(|()| suppression.validate());
        validated.map_err(|source| ModelError::GenerationConfig {
            path: path.into(),
            source,
        })?;
        let eos_token_ids = raw
            .eos_token_id
            .map_or_else(|| config.eos_token_ids.clone(), TokenIds::into_vec);
        Ok(Self {
            sampling,
            suppression,
            eos_token_ids,
        })
    }
}

/// Returns the fields of a generation config that are not applied and would have an effect, with
/// their values.
fn not_applied(config: &Map<String, Value>) -> Vec<String> {
    let is_neutral = |value: &Value, is_neutral_number: fn(f64) -> bool| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) | Value::String(_) => false,
        Value::Number(number) => number.as_f64().is_some_and(is_neutral_number),
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    };
    let fields = NOT_APPLIED
        .into_iter()
        .filter_map(|(field, neutral)| Some((field, config.get(field)?, neutral)));
    fields
        .filter(|&(_, value, neutral)| !is_neutral(value, neutral))
        .map(|(field, value, _)| format!("{field}: {value}"))
        .collect()
}

/// Returns the field of a `config.json` with the quantisation of weights.
pub(crate) fn quantization_field(config: &Value) -> Option<&Value> {
    Quantization::CONFIG_FIELDS
        .iter()
        .filter_map(|field| config.get(field))
        .find(|value| !value.is_null())
}

/// Reads a file as JSON.
pub(crate) fn read_json(path: &Path) -> Result<Value, ModelError> {
    let text =
        read_file(path, MAX_CONFIG_BYTES).map_err(|source| ModelError::io("read", path, source))?;
    serde_json::from_slice(&text).map_err(|source| ModelError::Json {
        path: path.into(),
        source,
    })
}

#[cfg(test)]
mod tests;
