//! The place of a sequence in its grammar.

use llguidance::Matcher;

use super::{GrammarError, message};

/// Follows the text of one sequence through a grammar.
pub struct GrammarState {
    matcher: Matcher,
    vocab_size: usize,
}

impl GrammarState {
    pub(super) fn new(matcher: Matcher, vocab_size: usize) -> Self {
        Self {
            matcher,
            vocab_size,
        }
    }

    /// Returns the tokens that may come next, as [`vocab_size.div_ceil(32)`](u32::BITS) words:
    /// token `t` is allowed if bit `t % 32` of word `t / 32` is set. At least one is.
    ///
    /// Where the text may end, the end-of-sequence tokens are allowed; after the end only they are.
    ///
    /// # Errors
    /// [`GrammarError::Stuck`] if no token can come next, or if the grammar is too complex here.
    /// Each later call fails the same way.
    pub fn mask(&mut self) -> Result<Vec<u32>, GrammarError> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(stuck)?;
        let words = self.vocab_size.div_ceil(32);
        Ok(allowed.as_slice()[..words].to_vec())
    }

    /// Takes the next token of the text. An end-of-sequence token may follow itself.
    ///
    /// # Errors
    /// [`GrammarError::Stuck`] if the grammar does not allow the token, or is too complex here.
    /// Each later call fails the same way.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.is_stopped() {
            let tokens = self.matcher.tok_env().map_err(stuck)?;
            if tokens.tok_trie().eos_tokens().contains(&token) {
                return Ok(());
            }
        }
        self.matcher.consume_token(token).map_err(stuck)
    }

    /// Returns true if the text is complete, and only an end-of-sequence token could follow.
    pub fn is_stopped(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }
}

fn stuck(error: impl std::fmt::Display) -> GrammarError {
    GrammarError::Stuck(message(&error))
}

impl std::fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarState")
            .field("vocab_size", &self.vocab_size)
            .field("stop_reason", &self.matcher.stop_reason())
            .finish()
    }
}
