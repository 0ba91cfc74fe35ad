//! Suppressed tokens, which may not come next: the options, and the suppressed tokens at each step
//! of a sequence.

use crate::sampling::SamplingError;

/// Options that suppress tokens. The logits of suppressed tokens are set to minus infinity, after
/// the repetition penalty and before temperature, also in greedy decoding.
///
/// The fields have the same names and meaning as in Hugging Face's `GenerationConfig`. Tokens
/// outside the vocabulary have no effect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Suppression {
    /// Tokens that are never chosen.
    pub suppress_tokens: Vec<u32>,
    /// Runs of tokens that are never completed: the last token of a run is not chosen if the
    /// sequence, including its prompt, ends with the other tokens of the run. A run that consists
    /// of a single stop token is ignored.
    pub bad_words_ids: Vec<Vec<u32>>,
    /// The number of new tokens before which no stop token is chosen.
    pub min_new_tokens: usize,
    /// The number of tokens of the sequence, including its prompt, before which no stop token is
    /// chosen.
    pub min_length: usize,
}

impl Suppression {
    /// Options that suppress no token.
    pub const NONE: Self = Self {
        suppress_tokens: Vec::new(),
        bad_words_ids: Vec::new(),
        min_new_tokens: 0,
        min_length: 0,
    };

    /// Checks that no run of tokens is empty.
    ///
    /// # Errors
    /// [`SamplingError::EmptyBadWord`] with the index of the empty run.
    pub fn validate(&self) -> Result<(), SamplingError> {
        match self.bad_words_ids.iter().position(Vec::is_empty) {
            Some(index) => Err(SamplingError::EmptyBadWord { index }),
            None => Ok(()),
        }
    }
}

/// The suppressed tokens of a running sequence.
#[derive(Debug)]
pub(crate) struct Suppressed {
    /// Tokens that are never chosen.
    always: Vec<u32>,
    /// Tokens that are not chosen before there are `min_new_tokens` new tokens.
    stop_tokens: Vec<u32>,
    min_new_tokens: usize,
    new_tokens: usize,
    /// The runs of two or more tokens that are never completed.
    words: Vec<Vec<u32>>,
    /// The last tokens of the sequence, as many as the longest run has before its last token.
    last: Vec<u32>,
    /// The choice whose suppressed tokens are on the device.
    written: Option<Choice>,
}

/// The state that decides which tokens are suppressed in a choice.
#[derive(Debug, PartialEq, Eq)]
struct Choice {
    may_stop: bool,
    /// The indices of the runs that the token could complete.
    words: Vec<usize>,
}

impl Suppressed {
    /// Creates the suppressed tokens of a sequence with a prompt; `None` if the options suppress
    /// nothing.
    pub(crate) fn new(options: &Suppression, stop_tokens: &[u32], prompt: &[u32]) -> Option<Self> {
        let Suppression {
            suppress_tokens,
            bad_words_ids,
            min_new_tokens,
            min_length,
        } = options;
        let (single, words): (Vec<_>, Vec<_>) = bad_words_ids
            .iter()
            .cloned()
            .partition(|word| word.len() == 1);
        let single = single
            .concat()
            .into_iter()
            .filter(|token| !stop_tokens.contains(token));
        let always: Vec<u32> = suppress_tokens.iter().copied().chain(single).collect();
        let min_new_tokens = if stop_tokens.is_empty() {
            0
        } else {
            (*min_new_tokens).max(min_length.saturating_sub(prompt.len()))
        };
        if always.is_empty() && words.is_empty() && min_new_tokens == 0 {
            return None;
        }
        let mut suppressed = Self {
            always,
            stop_tokens: stop_tokens.to_vec(),
            min_new_tokens,
            new_tokens: 0,
            words,
            last: prompt.to_vec(),
            written: None,
        };
        suppressed.shorten();
        Some(suppressed)
    }

    /// Returns true if the suppressed tokens depend on the tokens of the sequence, not only on
    /// their number.
    pub(crate) fn depends_on_tokens(&self) -> bool {
        !self.words.is_empty()
    }

    /// Adds a token to the sequence.
    pub(crate) fn push(&mut self, token: u32) {
        self.new_tokens += 1;
        self.last.push(token);
        self.shorten();
    }

    /// Returns the suppressed tokens for the choice of a token that comes `unknown` tokens after
    /// the end of the sequence; `None` if they are the same as in the last call. If they depend on
    /// tokens, `unknown` must be 0.
    pub(crate) fn change(&mut self, unknown: usize) -> Option<Vec<u32>> {
        let is_next = |word: &[u32]| {
            word.split_last()
                .is_some_and(|(_, before)| self.last.ends_with(before))
        };
        let words = (0..self.words.len())
            .filter(|&index| is_next(&self.words[index]))
            .collect();
        let choice = Choice {
            may_stop: self.new_tokens + unknown >= self.min_new_tokens,
            words,
        };
        if self.written.as_ref() == Some(&choice) {
            return None;
        }
        let stop_tokens = if choice.may_stop {
            &[]
        } else {
            self.stop_tokens.as_slice()
        };
        let of_words = choice
            .words
            .iter()
            .filter_map(|&index| self.words[index].last());
        let tokens = self
            .always
            .iter()
            .chain(stop_tokens)
            .chain(of_words)
            .copied()
            .collect();
        self.written = Some(choice);
        Some(tokens)
    }

    /// Forgets which suppressed tokens are on the device: the next [`change`](Self::change) returns
    /// them.
    pub(crate) fn forget(&mut self) {
        self.written = None;
    }

    /// Drops the first tokens of `last` that no run needs.
    fn shorten(&mut self) {
        let needed = self
            .words
            .iter()
            .map(|word| word.len() - 1)
            .max()
            .unwrap_or(0);
        self.last.drain(..self.last.len().saturating_sub(needed));
    }
}

#[cfg(test)]
mod tests;
