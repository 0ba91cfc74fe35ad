//! A sequence of a batch engine.

use marlin_nn::{SequenceState, SequenceStatus};

use super::super::RequestParams;
use super::super::executor::ModelExecutors;
use super::super::scheduler::Executor;
use crate::suppression::Suppressed;

/// A sequence in a slot.
pub(super) struct Sequence {
    /// The number of the sequence in its engine.
    pub id: u64,
    /// The row of the sequence, without token and position.
    row: SequenceState,
    suppressed: Option<Suppressed>,
    /// True if the suppressed tokens on the device are those that a mask leaves.
    is_masked: bool,
    /// The last token that was chosen, if it is known to the host.
    pub last: Option<u32>,
    /// The number of tokens that steps in flight choose.
    pub unknown: usize,
    /// The pages that are on the device.
    pub pages: Vec<u32>,
}

impl Sequence {
    /// Creates a sequence of a prompt and the tokens that were chosen after it. `row` has the
    /// sampling options.
    pub(super) fn new(
        id: u64,
        row: SequenceState,
        [prompt, chosen]: [&[u32]; 2],
        params: &RequestParams,
    ) -> Self {
        let mut suppressed = Suppressed::new(&params.suppression, &params.stop_tokens, prompt);
        if let Some(suppressed) = &mut suppressed {
            chosen.iter().for_each(|&token| suppressed.push(token));
        }
        Self {
            id,
            row: SequenceState {
                suppresses: suppressed.is_some(),
                ..row
            },
            suppressed,
            is_masked: false,
            last: None,
            unknown: 0,
            pages: Vec::new(),
        }
    }

    /// Returns the row of a token at a position.
    pub(super) fn row_at(&self, token: u32, position: usize) -> SequenceState {
        SequenceState {
            token,
            status: SequenceStatus::At(position as u32),
            ..self.row
        }
    }

    /// Returns true if the sequence asks for log probabilities.
    pub(super) fn wants_logprobs(&self) -> bool {
        self.row.logprobs.is_some()
    }

    /// Returns true if the tokens that the next row may choose depend on the tokens before.
    pub(super) fn depends_on_tokens(&self) -> bool {
        let depends = self.suppressed.as_ref();
        self.is_masked || depends.is_some_and(Suppressed::depends_on_tokens)
    }

    /// Sets the suppressed tokens on the device for the choice of the next token. `allowed` is the
    /// mask of the tokens that it may be, if there is one. Returns true if a row that is on the
    /// device has to be written anew, since it chooses among all tokens.
    pub(super) fn suppress(
        &mut self,
        executor: &mut ModelExecutors,
        slot: usize,
        allowed: Option<Vec<u32>>,
    ) -> bool {
        let was_masked = std::mem::replace(&mut self.is_masked, allowed.is_some());
        let (is_masked, unknown) = (self.is_masked, self.unknown);
        let tokens = self.suppressed.as_mut().and_then(|suppressed| {
            if was_masked || is_masked {
                // A mask replaces what is on the device, which is written anew after the last mask.
                suppressed.forget();
            }
            suppressed.change(unknown)
        });
        let Some(mut words) = allowed else {
            if tokens.is_some() || was_masked {
                executor.set_suppressed(slot, &tokens.unwrap_or_default());
            }
            return false;
        };
        words.iter_mut().for_each(|word| *word = !*word);
        for token in tokens.into_iter().flatten() {
            if let Some(word) = words.get_mut(token as usize / 32) {
                *word |= 1 << (token % 32);
            }
        }
        executor.set_suppressed_bitmap(slot, words);
        !std::mem::replace(&mut self.row.suppresses, true)
    }

    /// Takes the token that a step chose.
    pub(super) fn push(&mut self, token: u32) {
        self.unknown -= 1;
        self.last = Some(token);
        if let Some(suppressed) = &mut self.suppressed {
            suppressed.push(token);
        }
    }
}
