//! What the executor computes in a step.

use super::request::RequestId;
use crate::pages::PageId;
use std::sync::Arc;

/// The pages of a sequence: position `p` is in page `p / page_size`, at `p % page_size`.
///
/// It is shared with the sequence and copied when that changes, so as long as a table is the same
/// allocation ([`Arc::ptr_eq`]), a copy on the device is up to date.
pub type PageTable = Arc<Vec<PageId>>;

/// A step: rows of the model that are computed together. It goes back to
/// [`complete`](super::Scheduler::complete).
#[derive(Debug)]
#[must_use = "the scheduler waits until the step is completed"]
pub struct Step {
    /// The number of the step, from 0 on.
    pub id: u64,
    /// The parts of prompts.
    pub prefill: Vec<PrefillChunk>,
    /// The sequences that decode one token.
    pub decode: Vec<DecodeRow>,
}

impl Step {
    /// Returns the number of tokens that the step computes.
    pub fn tokens(&self) -> usize {
        let prefill: usize = self.prefill.iter().map(|chunk| chunk.tokens.len()).sum();
        prefill + self.decode.len()
    }
}

/// Consecutive tokens of a prompt. After a pre-emption, the tokens generated so far count as part
/// of the prompt.
#[derive(Debug)]
pub struct PrefillChunk {
    /// The request.
    pub request: RequestId,
    /// The token IDs.
    pub tokens: Vec<u32>,
    /// The position of the first token. All positions before have their keys and values.
    pub start: usize,
    /// The pages of the sequence, at least up to the last position of the chunk.
    pub pages: PageTable,
    /// True if the chunk ends the prompt, so that a token is sampled from its last row.
    pub ends_prompt: bool,
}

/// A sequence that decodes one token.
#[derive(Debug)]
pub struct DecodeRow {
    /// The request.
    pub request: RequestId,
    /// The token ID of the input, or `None` if it is what the step in flight samples for the
    /// request.
    pub token: Option<u32>,
    /// The position of the input. All positions before have their keys and values.
    pub position: usize,
    /// The pages of the sequence, at least up to the position.
    pub pages: PageTable,
}

/// The result of a prefill chunk or of a decode row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The keys and values were computed: of a chunk that does not end its prompt.
    Computed,
    /// A token was sampled: of a decode row, or of a chunk that ends its prompt.
    Token(u32),
    /// A token was sampled, and the sequence ends with it: the token is a stop token, or the text
    /// has a stop string.
    Stop(u32),
    /// The row was not computed, for this reason. The request fails.
    Failed(String),
}
