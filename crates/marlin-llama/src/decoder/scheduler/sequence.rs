//! A sequence of a decoder: its prompt, and the row that continues it.

use marlin_decode::{Row, RowState};

use super::PromptChunk;
use crate::model::CachePosition;
use crate::suppression::Suppressed;

pub(super) struct Sequence {
    /// No other sequence of this decoder has it; later ones have greater ones.
    pub(super) id: u64,
    pub(super) prompt: Vec<u32>,
    /// Tokens of the prompt that went through the model.
    pub(super) read: usize,
    /// The row of the next step; that of the prompt's last token before it is read.
    pub(super) row: Row,
    /// Tokens that may follow.
    pub(super) left: usize,
    pub(super) stop_tokens: Vec<u32>,
    /// The tokens that may not come next, if there are any.
    pub(super) suppressed: Option<Suppressed>,
}

impl Sequence {
    /// True if steps continue it: at most the last token of its prompt is not read, which is that
    /// of its row.
    pub(super) fn is_running(&self) -> bool {
        self.read + 1 >= self.prompt.len()
    }

    /// The token that continues it, as the end of a prompt.
    pub(super) fn as_chunk(&self, slot: usize) -> Option<PromptChunk> {
        let RowState::At(position) = self.row.state else {
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

    /// True if its next step can start before the tokens of the last one are known.
    pub(super) fn runs_ahead(&self) -> bool {
        self.left > 1
            && !self
                .suppressed
                .as_ref()
                .is_some_and(Suppressed::depends_on_tokens)
    }

    /// The tokens that are read next, at most `size`.
    pub(super) fn chunk(&self, size: usize) -> &[u32] {
        &self.prompt[self.read..self.prompt.len().min(self.read + size)]
    }
}
