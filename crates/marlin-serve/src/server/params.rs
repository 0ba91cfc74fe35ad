//! What is asked for.

use super::executor::Capabilities;
use crate::grammar::Grammar;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A request for text.
///
/// ```
/// use marlin_serve::server::{GenerationRequest, SamplingParams};
///
/// let request = GenerationRequest {
///     max_tokens: Some(100),
///     stop: vec!["\n\n".into()],
///     sampling: SamplingParams { temperature: 0.7, ..SamplingParams::default() },
///     ..GenerationRequest::new(vec![1, 2, 3])
/// };
/// ```
#[derive(Debug, Clone)]
pub struct GenerationRequest {
    /// The token IDs of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// The most tokens that are generated, at least one; as many as the model's window and the KV
    /// cache have room for if `None`.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Texts that end the sequence. They are found across the borders of tokens, and are not part
    /// of the text. At most [`MAX_STOP_STRINGS`](Self::MAX_STOP_STRINGS) of at most
    /// [`MAX_STOP_BYTES`](Self::MAX_STOP_BYTES) bytes.
    pub stop: Vec<String>,
    /// Tokens that end the sequence besides the [end-of-sequence
    /// tokens](super::ServerOptions::eos_tokens). The text of such a token is not part of the text.
    pub stop_token_ids: Vec<u32>,
    /// True to go on after end-of-sequence tokens.
    pub ignore_eos: bool,
    /// The grammar that the text follows, compiled for the model's vocabulary. The sequence ends as
    /// soon as the grammar allows nothing more.
    pub grammar: Option<Arc<Grammar>>,
    /// The priority; a higher one goes first.
    pub priority: i32,
    /// The client among which service is shared out evenly if
    /// [`fair`](crate::SchedulerConfig::fair) is set.
    pub key: u64,
    /// The longest time until the request first leaves the waiting queue; not limited if `None`.
    pub queue_timeout: Option<Duration>,
    /// The longest time until the request ends; not limited if `None`.
    pub timeout: Option<Duration>,
}

impl GenerationRequest {
    /// The most stop strings of a request.
    pub const MAX_STOP_STRINGS: usize = 64;
    /// The most bytes of a stop string.
    pub const MAX_STOP_BYTES: usize = 1024;

    /// Makes a request with [default](SamplingParams::default) sampling and no limits but those of
    /// the model and the KV cache.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            max_tokens: None,
            sampling: SamplingParams::default(),
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            grammar: None,
            priority: 0,
            key: 0,
            queue_timeout: None,
            timeout: None,
        }
    }

    /// Checks all that does not depend on the KV cache.
    pub(super) fn check(&self, capabilities: &Capabilities) -> Result<(), ParamError> {
        let vocab_size = capabilities.vocab_size;
        in_vocabulary("prompt", &self.prompt, vocab_size)?;
        in_vocabulary("stop_token_ids", &self.stop_token_ids, vocab_size)?;
        let (count, most) = (self.stop.len(), Self::MAX_STOP_STRINGS);
        require("stop", count <= most, || {
            format!("{count} strings; it may have at most {most}")
        })?;
        for stop in &self.stop {
            let (len, most) = (stop.len(), Self::MAX_STOP_BYTES);
            require("stop", (1..=most).contains(&len), || {
                format!("a string of {len} bytes; each must have 1 to {most}")
            })?;
        }
        if let Some(max_tokens) = self.max_tokens {
            let min_tokens = self.sampling.min_tokens;
            require("max_tokens", max_tokens > 0, || {
                "0; it must be at least 1".into()
            })?;
            require("min_tokens", min_tokens <= max_tokens, || {
                format!("{min_tokens}; it must be at most max_tokens, {max_tokens}")
            })?;
        }
        if self.grammar.is_some() && !capabilities.masks {
            return Err(ParamError::Unsupported { param: "grammar" });
        }
        self.sampling.check(capabilities)
    }
}

/// How tokens are chosen from the logits.
///
/// The order is: penalties, [`logit_bias`](Self::logit_bias), tokens that are not allowed,
/// temperature, top-k, top-p, min-p.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// The divisor of the logits; 0 always takes the most likely token. By default 1.
    pub temperature: f32,
    /// The number of most likely tokens to choose from; all if `None`, the default.
    pub top_k: Option<usize>,
    /// The total probability of the most likely tokens to choose from, more than 0; by default 1,
    /// for all tokens.
    pub top_p: f32,
    /// The probability, relative to the most likely token, that a token must have to be chosen; by
    /// default 0, for all tokens.
    pub min_p: f32,
    /// The factor by which tokens of the prompt and of the text are made less likely: positive
    /// logits are divided by it, others multiplied. By default 1.
    pub repetition_penalty: f32,
    /// What is taken from the logits of tokens that are in the generated text, -2 to 2; by default
    /// 0.
    pub presence_penalty: f32,
    /// What is taken from the logits of tokens for each time that they are in the generated text,
    /// -2 to 2; by default 0.
    pub frequency_penalty: f32,
    /// What is added to the logits of tokens, by token ID, -100 to 100.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Tokens that are never chosen.
    pub suppress_tokens: Vec<u32>,
    /// Runs of tokens that are never completed: the last token of a run is not chosen after the
    /// others.
    pub bad_words_ids: Vec<Vec<u32>>,
    /// The number of tokens that come before one that can end the sequence or a stop string; by
    /// default 0.
    pub min_tokens: usize,
    /// The seed of the random choices; a random one if `None`, the default.
    pub seed: Option<u64>,
    /// The number of most likely tokens whose log probabilities are returned with that of each
    /// token; 0 for that of the token alone, `None`, the default, for none.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            suppress_tokens: Vec::new(),
            bad_words_ids: Vec::new(),
            min_tokens: 0,
            seed: None,
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Checks the ranges of the parameters, and that the executor can do what they ask for.
    fn check(&self, capabilities: &Capabilities) -> Result<(), ParamError> {
        let finite_range = f32::MIN..=f32::MAX;
        let vocab_size = capabilities.vocab_size;
        for (param, value, ok, expected) in [
            (
                "temperature",
                self.temperature,
                (0.0..=f32::MAX).contains(&self.temperature),
                "finite and at least 0",
            ),
            (
                "top_p",
                self.top_p,
                self.top_p > 0.0 && self.top_p <= 1.0,
                "more than 0 and at most 1",
            ),
            (
                "min_p",
                self.min_p,
                (0.0..=1.0).contains(&self.min_p),
                "0 to 1",
            ),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0 && finite_range.contains(&self.repetition_penalty),
                "finite and more than 0",
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                (-2.0..=2.0).contains(&self.presence_penalty),
                "-2 to 2",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                (-2.0..=2.0).contains(&self.frequency_penalty),
                "-2 to 2",
            ),
        ] {
            require(param, ok, || format!("{value}; it must be {expected}"))?;
        }
        require("top_k", self.top_k != Some(0), || {
            "0; it must be at least 1".into()
        })?;
        for (&token, &bias) in &self.logit_bias {
            in_vocabulary("logit_bias", &[token], vocab_size)?;
            require("logit_bias", (-100.0..=100.0).contains(&bias), || {
                format!("{bias} for token {token}; it must be -100 to 100")
            })?;
        }
        in_vocabulary("suppress_tokens", &self.suppress_tokens, vocab_size)?;
        for word in &self.bad_words_ids {
            require("bad_words_ids", !word.is_empty(), || {
                "a list with an empty word; each must have at least one token".into()
            })?;
            in_vocabulary("bad_words_ids", word, vocab_size)?;
        }
        self.check_support(capabilities)
    }

    fn check_support(&self, capabilities: &Capabilities) -> Result<(), ParamError> {
        for (param, asked, supported) in [
            (
                "presence_penalty",
                self.presence_penalty != 0.0,
                capabilities.penalties,
            ),
            (
                "frequency_penalty",
                self.frequency_penalty != 0.0,
                capabilities.penalties,
            ),
            (
                "logit_bias",
                !self.logit_bias.is_empty(),
                capabilities.logit_bias,
            ),
            (
                "logprobs",
                self.logprobs.is_some(),
                capabilities.max_logprobs.is_some(),
            ),
        ] {
            if asked && !supported {
                return Err(ParamError::Unsupported { param });
            }
        }
        if let (Some(found), Some(most)) = (self.logprobs, capabilities.max_logprobs) {
            require("logprobs", found <= most, || {
                format!("{found}; it must be at most {most}")
            })?;
        }
        Ok(())
    }
}

fn require(
    param: &'static str,
    ok: bool,
    problem: impl FnOnce() -> String,
) -> Result<(), ParamError> {
    if ok {
        return Ok(());
    }
    let problem = problem();
    Err(ParamError::Invalid { param, problem })
}

fn in_vocabulary(param: &'static str, tokens: &[u32], vocab_size: usize) -> Result<(), ParamError> {
    match tokens.iter().find(|&&token| token as usize >= vocab_size) {
        None => Ok(()),
        Some(token) => Err(ParamError::Invalid {
            param,
            problem: format!(
                "token {token}; the model's vocabulary has {vocab_size} tokens, from 0 on"
            ),
        }),
    }
}

/// A parameter that a request cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParamError {
    /// A value that no server takes.
    #[error("{param} is {problem}")]
    Invalid {
        /// The field's name.
        param: &'static str,
        /// The value and what is expected.
        problem: String,
    },
    /// A parameter that the executor does not support.
    #[error("{param} is not supported by this server's executor; leave it out")]
    Unsupported {
        /// The field's name.
        param: &'static str,
    },
}
