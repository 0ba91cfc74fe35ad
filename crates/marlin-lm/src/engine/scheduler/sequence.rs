//! A sequence of an engine, with its prompt and the row that continues it.

use marlin_nn::{SequenceState, SequenceStatus};

use super::PromptChunk;
use crate::model::CachePosition;
use crate::suppression::Suppressed;

pub(super) struct Sequence {
    /// The id of the sequence, unique in this engine. Ids increase in the order in which requests
    /// are added.
    pub(super) id: u64,
    pub(super) prompt: Vec<u32>,
    /// The number of the prompt's tokens that went through the model.
    pub(super) read: usize,
    /// The row of the next step; before the prompt is read, the row of its last token.
    pub(super) row: SequenceState,
    /// The number of tokens that may follow.
    pub(super) remaining_tokens: usize,
    pub(super) stop_tokens: Vec<u32>,
    /// The suppressed tokens, if there are any.
    pub(super) suppressed: Option<Suppressed>,
}

impl Sequence {
    /// Returns true if steps continue the sequence: all tokens of its prompt are read, except
    /// possibly the last one, which is the token of its row.
    pub(super) fn is_running(&self) -> bool {
        self.read + 1 >= self.prompt.len()
    }

    /// Returns the token that continues the sequence as a chunk that ends a prompt.
    pub(super) fn as_chunk(&self, slot: usize) -> Option<PromptChunk> {
        let SequenceStatus::At(position) = self.row.status else {
            return None;
        };
        Some(PromptChunk {
            tokens: vec![self.row.token],
            position: CachePosition {
                slot,
                start: position as usize,
            },
            end: Some(self.row),
        })
    }

    /// Returns true if the next step can start before the tokens of the last step are known.
    pub(super) fn runs_ahead(&self) -> bool {
        self.remaining_tokens > 1
            && !self
                .suppressed
                .as_ref()
                .is_some_and(Suppressed::depends_on_tokens)
    }

    /// Returns the tokens to read next, at most `size`.
    pub(super) fn chunk(&self, size: usize) -> &[u32] {
        &self.prompt[self.read..self.prompt.len().min(self.read + size)]
    }
}
