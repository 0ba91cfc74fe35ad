//! Text from a prompt.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::folder::Llama;
use crate::model::KvCache;
use crate::sampling::{Sampler, Sampling};
use crate::tokenizer::TextStream;
use crate::{LlamaError, LlamaModel};

/// How a text is generated.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Tokens that end the text; they are not part of it.
    pub stop_tokens: Vec<u32>,
    /// The seed of the random choices.
    pub seed: u64,
}

/// A generated text, and what it took.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The text after the prompt, without special tokens.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Tokens in the prompt.
    pub prompt_tokens: usize,
    /// The time from the prompt's tokens to the first logits on the host.
    pub prefill: Duration,
    /// The time after that.
    pub decode: Duration,
    /// Why it ended.
    pub stop_reason: StopReason,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model chose one of the stop tokens, this one.
    StopToken(u32),
    /// There are as many tokens as were asked for.
    MaxNewTokens,
    /// The cache has no room for more.
    CacheFull,
}

impl Llama {
    /// Options as the model's makers chose them, for at most `max_new_tokens` tokens.
    pub fn default_options(&self, max_new_tokens: usize) -> GenerateOptions {
        let generation = &self.generation;
        GenerateOptions { max_new_tokens, sampling: generation.sampling, stop_tokens: generation.eos_token_ids.clone(), seed: 0 }
    }

    /// Continues a prompt. `on_text` gets the text in pieces of whole characters, as they come.
    ///
    /// # Errors
    /// As [`generate_from`](Self::generate_from).
    pub fn generate(&self, prompt: &str, options: &GenerateOptions, on_text: impl FnMut(&str)) -> Result<Generation, LlamaError> {
        self.generate_from(self.tokenizer()?.encode(prompt)?, options, on_text)
    }

    /// The same from a prompt's tokens.
    ///
    /// # Errors
    /// [`LlamaError::NoTokenizer`], [`LlamaError::EmptyPrompt`], [`LlamaError::PromptTooLong`] with both numbers, [`LlamaError::Token`] for tokens
    /// outside the vocabulary, [`LlamaError::Sampling`] for options outside their range and broken logits, [`LlamaError::Read`] where the device
    /// fails.
    pub fn generate_from(
        &self,
        prompt: Vec<u32>,
        options: &GenerateOptions,
        mut on_text: impl FnMut(&str),
    ) -> Result<Generation, LlamaError> {
        let (tokenizer, vocab_size) = (self.tokenizer()?, self.model.config().vocab_size);
        if let Some((position, &token)) = prompt.iter().enumerate().find(|&(_, &token)| token as usize >= vocab_size) {
            return Err(LlamaError::Token { token, position, vocab_size });
        }
        let mut history = prompt;
        let (prompt_tokens, room) = (history.len(), self.model.max_len());
        if prompt_tokens == 0 {
            return Err(LlamaError::EmptyPrompt);
        }
        if prompt_tokens > room {
            return Err(LlamaError::PromptTooLong { tokens: prompt_tokens, room });
        }
        let mut sampler = Sampler::new(options.sampling, options.seed)?;
        let mut stream = TextStream::after(tokenizer, &history)?;
        let mut text = String::new();
        let mut show = |piece: Option<String>| {
            if let Some(piece) = piece {
                on_text(&piece);
                text.push_str(&piece);
            }
        };

        let mut cache = self.model.new_cache(1);
        let start = Instant::now();
        let mut prefill = None;
        let mut unseen = 0;
        let stop_reason = loop {
            if history.len() - prompt_tokens >= options.max_new_tokens {
                break StopReason::MaxNewTokens;
            }
            if history.len() > room {
                break StopReason::CacheFull;
            }
            let logits = next_logits(&self.model, &history[unseen..], &mut cache)?;
            unseen = history.len();
            prefill.get_or_insert_with(|| start.elapsed());
            let token = sampler.sample(&logits, &history)?;
            if options.stop_tokens.contains(&token) {
                break StopReason::StopToken(token);
            }
            history.push(token);
            show(stream.push(token)?);
        };
        show(stream.finish()?);
        let prefill = prefill.unwrap_or_default();
        let decode = start.elapsed().saturating_sub(prefill);
        Ok(Generation { text, tokens: history.split_off(prompt_tokens), prompt_tokens, prefill, decode, stop_reason })
    }
}

/// The logits after `tokens` that follow those in the cache, on the host.
fn next_logits(model: &LlamaModel, tokens: &[u32], cache: &mut KvCache) -> Result<Vec<f32>, LlamaError> {
    let logits = model.forward_last(token_tensor(tokens, [1, tokens.len()], &model.device()), cache);
    logits.try_into_vec_as::<f32>().map_err(|error| LlamaError::Read { tensor: "logits".into(), reason: error.to_string() })
}

/// Tokens as a tensor [batch, seq].
pub(crate) fn token_tensor(tokens: &[u32], shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(tokens.iter().map(|&token| i64::from(token)).collect(), shape), device)
}
