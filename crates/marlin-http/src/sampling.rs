//! The fields of requests that say how tokens are chosen, and when the answer ends.

use crate::auth::Client;
use crate::error::ApiError;
use crate::state::ApiState;
use marlin_serve::server::{GenerationRequest, SamplingParams};
use openai_protocol::common::{StreamOptions, StringOrArray};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};

/// Fields that say nothing about the answer: who asks, and what OpenAI's servers do with it.
const IGNORED: [&str; 5] = [
    "user",
    "store",
    "prompt_cache_retention",
    "cache_salt",
    "request_id",
];
/// The most stop tokens of a request.
const MAX_STOP_TOKENS: usize = 128;

/// The fields that requests of all APIs share.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fields {
    pub max_tokens: Option<u32>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    /// -1 and 0 are no limit.
    pub top_k: Option<i32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    /// The additions to logits, by token ID.
    pub logit_bias: HashMap<String, f32>,
    pub seed: Option<i64>,
    pub min_tokens: Option<u32>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    /// The number of alternatives whose log probabilities are asked for.
    pub logprobs: Option<u32>,
    pub priority: i32,
}

/// What is asked of a stream.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StreamFields {
    /// True if the last chunk has the usage.
    pub usage: bool,
    /// True if every chunk has the usage so far.
    pub continuous_usage: bool,
}

impl StreamFields {
    /// Returns what is asked of a stream; `None` if none is.
    pub fn new(stream: bool, options: Option<&StreamOptions>) -> Result<Option<Self>, ApiError> {
        let Some(options) = options else {
            return Ok(stream.then(Self::default));
        };
        refuse_unknown(&options.other, "stream_options.", &[])?;
        if options.include_obfuscation == Some(true) {
            return Err(ApiError::unsupported(
                "stream_options.include_obfuscation",
                "Chunks are not obfuscated by this server.",
            ));
        }
        let continuous_usage = options.continuous_usage_stats == Some(true);
        Ok(stream.then_some(Self {
            usage: options.include_usage == Some(true) || continuous_usage,
            continuous_usage,
        }))
    }
}

impl Fields {
    /// Returns the request to the engine, without its prompt. What is not given has the model's
    /// default.
    pub fn request(self, state: &ApiState, client: Client) -> Result<GenerationRequest, ApiError> {
        if self.stop_token_ids.len() > MAX_STOP_TOKENS {
            return Err(ApiError::invalid(
                "stop_token_ids",
                format!("At most {MAX_STOP_TOKENS} stop tokens may be given."),
            ));
        }
        let options = state.options();
        let default = state.model().sampling.clone();
        let top_k = match self.top_k {
            None => default.top_k,
            Some(top_k) => usize::try_from(top_k).ok().filter(|&top_k| top_k > 0),
        };
        let sampling = SamplingParams {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_p: self.top_p.unwrap_or(default.top_p),
            top_k,
            min_p: self.min_p.unwrap_or(default.min_p),
            repetition_penalty: self
                .repetition_penalty
                .unwrap_or(default.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(default.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(default.frequency_penalty),
            logit_bias: logit_bias(self.logit_bias)?,
            min_tokens: self.min_tokens.unwrap_or(0) as usize,
            seed: self.seed.map(i64::cast_unsigned),
            logprobs: self.logprobs.map(|logprobs| logprobs as usize),
            ..default
        };
        Ok(GenerationRequest {
            max_tokens: self.max_tokens.map(|tokens| tokens as usize),
            sampling,
            stop: self.stop,
            stop_token_ids: self.stop_token_ids,
            ignore_eos: self.ignore_eos,
            priority: self.priority,
            key: client.0,
            queue_timeout: options.queue_timeout,
            timeout: options.request_timeout,
            ..GenerationRequest::new(Vec::new())
        })
    }
}

/// Reads the keys of a logit bias, which are token IDs.
fn logit_bias(by_text: HashMap<String, f32>) -> Result<BTreeMap<u32, f32>, ApiError> {
    let entries = by_text.into_iter().map(|(token, bias)| {
        let id = token.parse().map_err(|_| {
            ApiError::invalid("logit_bias", format!("The key `{token}` is no token ID."))
        })?;
        Ok((id, bias))
    });
    entries.collect()
}

/// Returns the stop strings of a request.
pub(crate) fn stop(stop: Option<StringOrArray>) -> Vec<String> {
    stop.map(|stop| stop.to_vec()).unwrap_or_default()
}

/// Refuses fields that the server does not know, and fields outside of the API that it does not
/// support. `prefix` is the place of the fields, `read` are those that the caller reads.
pub(crate) fn refuse_unknown(
    fields: &Map<String, Value>,
    prefix: &str,
    read: &[&str],
) -> Result<(), ApiError> {
    let unknown = fields.iter().find(|(name, value)| {
        let name = name.as_str();
        !value.is_null() && !IGNORED.contains(&name) && !read.contains(&name)
    });
    match unknown {
        None => Ok(()),
        Some((name, _)) => Err(ApiError::unsupported(
            format!("{prefix}{name}"),
            format!("The field `{prefix}{name}` is not supported by this server."),
        )),
    }
}

/// Refuses a field that has a value other than the one that changes nothing.
pub(crate) fn refuse_if(is_set: bool, name: &str) -> Result<(), ApiError> {
    match is_set {
        false => Ok(()),
        true => Err(ApiError::unsupported(
            name,
            format!("This value of `{name}` is not supported by this server."),
        )),
    }
}
