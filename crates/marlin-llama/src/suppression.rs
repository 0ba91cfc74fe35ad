//! Tokens that may not come next: options, and which they are at each step of a sequence.

use crate::sampling::SamplingError;

/// Tokens that a sequence may not have: their logits are minus infinity, after the repetition
/// penalty and before temperature, in greedy decoding too.
///
/// The fields have the names and the meaning that they have in Hugging Face's `GenerationConfig`.
/// Tokens outside the vocabulary change nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Suppression {
    /// Tokens that are never chosen.
    pub suppress_tokens: Vec<u32>,
    /// Runs of tokens that are never completed: the last token of one is not chosen where the
    /// sequence, its prompt included, ends with those before it. A run that is a stop token alone
    /// is ignored.
    pub bad_words_ids: Vec<Vec<u32>>,
    /// No stop token is chosen before so many new tokens.
    pub min_new_tokens: usize,
    /// No stop token is chosen before the sequence, its prompt included, has so many tokens.
    pub min_length: usize,
}

impl Suppression {
    /// Every token may come next.
    pub const NONE: Self = Self {
        suppress_tokens: Vec::new(),
        bad_words_ids: Vec::new(),
        min_new_tokens: 0,
        min_length: 0,
    };

    /// Checks that no run of tokens is empty.
    ///
    /// # Errors
    /// [`SamplingError::EmptyBadWord`], with its number.
    pub fn validate(&self) -> Result<(), SamplingError> {
        match self.bad_words_ids.iter().position(Vec::is_empty) {
            Some(index) => Err(SamplingError::EmptyBadWord { index }),
            None => Ok(()),
        }
    }
}

/// The suppressed tokens of a sequence that goes on.
#[derive(Debug)]
pub(crate) struct Suppressed {
    /// Tokens that are never chosen.
    always: Vec<u32>,
    /// Tokens that are not chosen before there are `min_new_tokens`.
    stop_tokens: Vec<u32>,
    min_new_tokens: usize,
    new_tokens: usize,
    /// Runs of two tokens and more.
    words: Vec<Vec<u32>>,
    /// The last tokens of the sequence, as many as the longest run has before its last one.
    last: Vec<u32>,
    /// The choice that the device has the tokens of.
    written: Option<Choice>,
}

/// What decides which tokens are suppressed in the choice of a token.
#[derive(Debug, PartialEq, Eq)]
struct Choice {
    may_stop: bool,
    /// The runs that the token would complete, by number.
    words: Vec<usize>,
}

impl Suppressed {
    /// The suppressed tokens of a sequence with a prompt; none if the options suppress nothing.
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

    /// True if the suppressed tokens follow from the tokens of the sequence, not from their number
    /// alone.
    pub(crate) fn depends_on_tokens(&self) -> bool {
        !self.words.is_empty()
    }

    /// The sequence goes on with a token.
    pub(crate) fn push(&mut self, token: u32) {
        self.new_tokens += 1;
        self.last.push(token);
        self.shorten();
    }

    /// The suppressed tokens in the choice of the token that follows `unknown` tokens after those
    /// of the sequence; none if they are the same as in the last call. Where they depend on tokens,
    /// none may be unknown.
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

    /// Forgets the tokens that no run reaches back to.
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
