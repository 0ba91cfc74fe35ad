//! Steps: what a caller asks for, and what is in flight.

use marlin_nn::TokenLogprobs;

use super::super::executor::{ModelExecutors, RanksStep};
use super::super::scheduler::{Executor, PromptChunk};
use crate::sampling::SamplingError;

/// Consecutive tokens of a prompt.
#[derive(Debug, Clone, Copy)]
pub struct PromptPart<'a> {
    /// The slot of the sequence.
    pub slot: usize,
    /// The position of the first token. All positions before have their keys and values.
    pub start: usize,
    /// The token IDs.
    pub tokens: &'a [u32],
    /// The pages of the slot, at least up to the last position.
    pub pages: &'a [u32],
    /// True if the prompt ends with these tokens, so that the first new token is chosen.
    pub ends: bool,
}

/// A token that continues a sequence.
#[derive(Debug, Clone, Copy)]
pub struct DecodeToken<'a> {
    /// The slot of the sequence.
    pub slot: usize,
    /// The token, or `None` if it is what the last step chose for the sequence, which the caller
    /// need not have finished.
    pub token: Option<u32>,
    /// The position of the token. All positions before have their keys and values.
    pub position: usize,
    /// The pages of the slot, at least up to the position.
    pub pages: &'a [u32],
}

/// The tokens that a row may choose.
#[derive(Debug, Clone)]
pub struct AllowedTokens {
    /// The slot of the sequence.
    pub slot: usize,
    /// A bit for each token of the vocabulary: token `t` may be chosen if bit `t % 32` of word
    /// `t / 32` is set.
    pub words: Vec<u32>,
}

/// The outcome of a step for a part of a prompt, or for a decoded token.
#[derive(Debug, Clone, PartialEq)]
pub enum BatchOutput {
    /// The keys and values of a part that does not end its prompt were computed.
    Computed,
    /// A token was chosen.
    Token {
        /// The token ID.
        token: u32,
        /// The log probabilities, if the sequence asks for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// No token could be chosen.
    Failed(SamplingError),
}

/// A step that was started, for [`BatchEngine::finish`](super::BatchEngine::finish).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a step is finished before the steps after it"]
pub struct BatchStep(pub(super) u64);

/// A step in flight.
pub(super) struct Started {
    pub id: u64,
    pub passes: Vec<StartedPass>,
    pub outputs: Vec<BatchOutput>,
}

/// A pass of a step, with its rows that choose a token, in the order of the device; `None` is an
/// idle row.
pub(super) struct StartedPass {
    pub step: RanksStep,
    pub rows: Vec<Option<ChoosingRow>>,
}

impl StartedPass {
    /// Starts a pass of chunks of prompts. Returns the pass if it chooses tokens.
    pub(super) fn prefill(
        executor: &mut ModelExecutors,
        chunks: &mut Vec<PromptChunk>,
        rows: &mut Vec<Option<ChoosingRow>>,
    ) -> Option<Self> {
        if chunks.is_empty() {
            return None;
        }
        let step = executor.prefill(&std::mem::take(chunks));
        let rows = std::mem::take(rows);
        step.map(|step| Self { step, rows })
    }
}

/// A row that chooses a token.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChoosingRow {
    /// The index of the output of the step.
    pub output: usize,
    pub slot: usize,
    /// The id of the sequence that was in the slot when the step was started.
    pub sequence: u64,
}
