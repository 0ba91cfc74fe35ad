//! Generation of text from a prompt.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use marlin_nn::ahead::CompiledAhead;
use marlin_text::TextStream;

use crate::ModelError;
use crate::engine::{Engine, RequestParams, StepOutput, StopReason};
use crate::folder::LanguageModel;
use crate::sampling::Sampling;
use crate::suppression::Suppression;

/// Options for generating a text.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// The largest number of tokens to generate.
    pub max_new_tokens: usize,
    /// The choice of the next token.
    pub sampling: Sampling,
    /// Tokens that may not come next.
    pub suppression: Suppression,
    /// Tokens that end the text; they are not part of the text.
    pub stop_tokens: Vec<u32>,
    /// The seed of the random choices.
    pub seed: u64,
    /// True to call [`Engine::warm_up`] with the prompt's length first, so that the times of
    /// prefill and decoding do not include compilation.
    pub warm_up: bool,
    /// True to call [`Engine::compile_ahead`] before the warm-up, for a process that finds no
    /// compiled kernels on disk.
    pub compile_ahead: bool,
    /// True if the text is an answer, rather than a continuation of the prompt: the first token of
    /// SentencePiece then loses its leading space, as in transformers.
    pub answer: bool,
}

/// A generated text, and its times.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The text after the prompt, without special tokens.
    pub text: String,
    /// The tokens of the text.
    pub tokens: Vec<u32>,
    /// The number of tokens in the prompt.
    pub prompt_tokens: usize,
    /// The time of the warm-up, including compilation ahead of it; zero if there was neither.
    pub warm_up: Duration,
    /// The time from the prompt's tokens to the first new token on the host.
    pub prefill: Duration,
    /// The time after the first new token.
    pub decode: Duration,
    /// The reason why the text ended.
    pub stop_reason: StopReason,
}

impl LanguageModel {
    /// Returns the options of the model's own generation config, for at most `max_new_tokens`
    /// tokens.
    pub fn default_options(&self, max_new_tokens: usize) -> GenerateOptions {
        let generation = &self.generation;
        GenerateOptions {
            max_new_tokens,
            sampling: generation.sampling,
            suppression: generation.suppression.clone(),
            stop_tokens: generation.eos_token_ids.clone(),
            seed: 0,
            warm_up: false,
            compile_ahead: false,
            answer: false,
        }
    }

    /// Continues a prompt. `on_text` receives the text in pieces of whole characters, as they are
    /// generated. If it breaks, the text ends there, with [`StopReason::Stopped`].
    ///
    /// # Errors
    /// See [`generate_from`](Self::generate_from).
    pub fn generate(
        &self,
        prompt: &str,
        options: &GenerateOptions,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation, ModelError> {
        self.generate_from(self.tokenizer()?.encode(prompt)?, options, on_text)
    }

    /// Continues a prompt that is given as tokens; otherwise like [`generate`](Self::generate).
    ///
    /// # Errors
    /// [`ModelError::NoTokenizer`], [`ModelError::EmptyPrompt`], [`ModelError::PromptTooLong`] with
    /// both numbers, [`ModelError::Token`] for tokens outside the vocabulary,
    /// [`ModelError::Sampling`] for options outside their range and broken logits,
    /// [`ModelError::Read`] if the device fails.
    pub fn generate_from(
        &self,
        prompt: Vec<u32>,
        options: &GenerateOptions,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation, ModelError> {
        let tokenizer = self.tokenizer()?;
        let GenerateOptions {
            max_new_tokens,
            sampling,
            ref suppression,
            ref stop_tokens,
            seed,
            warm_up,
            compile_ahead,
            answer,
        } = *options;
        let mut engine = Engine::new(self.model.clone(), 1)?;
        let compiled = if compile_ahead {
            compile(&mut engine, prompt.len())
        } else {
            Duration::ZERO
        };
        let warm_up = compiled
            + if warm_up {
                engine.warm_up(prompt.len())
            } else {
                Duration::ZERO
            };
        let start = Instant::now();
        let (suppression, stop_tokens) = (suppression.clone(), stop_tokens.clone());
        engine.add_request(
            &prompt,
            &RequestParams {
                sampling,
                suppression,
                seed,
                stop_tokens,
                max_new_tokens,
                ..RequestParams::default()
            },
        )?;
        let mut stream = TextStream::after(tokenizer, if answer { &[] } else { &prompt })?;
        let mut text = String::new();
        let mut show = |piece: Option<String>| {
            piece.map_or(ControlFlow::Continue(()), |piece| {
                text.push_str(&piece);
                on_text(&piece)
            })
        };

        let mut tokens = Vec::new();
        let mut prefill = None;
        let mut stop_reason = loop {
            if max_new_tokens == 0 {
                break StopReason::MaxNewTokens;
            }
            let Some(StepOutput { token, end, .. }) = engine.step()?.pop() else {
                break StopReason::MaxNewTokens;
            };
            prefill.get_or_insert_with(|| start.elapsed());
            if let Some(token) = token {
                tokens.push(token);
                if show(stream.push(token)?).is_break() {
                    break StopReason::Stopped;
                }
            }
            if let Some(end) = end {
                break end?;
            }
        };
        if stop_reason != StopReason::Stopped && show(stream.finish()?).is_break() {
            stop_reason = StopReason::Stopped;
        }
        tracing::debug!(tokens = tokens.len(), ?stop_reason, "the text ended");
        let prefill = prefill.unwrap_or_default();
        let decode = start.elapsed().saturating_sub(prefill);
        Ok(Generation {
            text,
            tokens,
            prompt_tokens: prompt.len(),
            warm_up,
            prefill,
            decode,
            stop_reason,
        })
    }
}

/// Compiles kernels ahead of time, and returns the time that it took; zero if there was nothing to
/// compile on this device.
fn compile(engine: &mut Engine, prompt_tokens: usize) -> Duration {
    let start = Instant::now();
    let CompiledAhead { operations, failed } = engine.compile_ahead(prompt_tokens);
    if operations == 0 {
        return Duration::ZERO;
    }
    let took = start.elapsed();
    tracing::debug!(
        operations,
        failed,
        seconds = took.as_secs_f64(),
        "kernels compiled on all cores"
    );
    took
}
