//! Sampling options, which [`marlin_nn::sample`] applies.

use marlin_nn::{SequenceState, SequenceStatus};

/// Options for the choice of the next token.
///
/// The options are applied in this order: repetition penalty, presence and frequency penalty with
/// the [logit bias](crate::RequestParams::logit_bias), [suppressed tokens](crate::Suppression),
/// temperature, top-k, top-p, min-p. Hugging Face's `generate` has the same order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// The divisor of the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// The number of most likely tokens to choose from.
    pub top_k: Option<usize>,
    /// The total probability of the most likely tokens to choose from; 1 for all tokens.
    pub top_p: f32,
    /// The probability, relative to the most likely token, that a token must have to be chosen
    /// (arXiv 2407.01082); 0 for all tokens, 1 for only the most likely one.
    pub min_p: f32,
    /// The penalty on tokens that already occurred; 1 for no penalty. Positive logits of such
    /// tokens are divided by the penalty, and negative logits are multiplied by it.
    pub repetition_penalty: f32,
    /// What is subtracted from the logits of tokens that were generated before; 0 for no penalty.
    pub presence_penalty: f32,
    /// What is subtracted from the logit of a token for each time that it was generated before; 0
    /// for no penalty.
    pub frequency_penalty: f32,
}

/// An error in the choice of the next token.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// An option outside its range.
    #[error("{option} is {found}; it must be {expected}")]
    Option {
        /// The option.
        option: &'static str,
        /// The value of the option.
        found: f32,
        /// The range of accepted values.
        expected: &'static str,
    },
    /// A bad word without tokens, which would be completed at every step.
    #[error(
        "bad word {index} of bad_words_ids, counted from 0, has no tokens; it must have at least one"
    )]
    EmptyBadWord {
        /// The index of the bad word in the list.
        index: usize,
    },
    /// A logit bias of a token outside the vocabulary.
    #[error("logit_bias has token {token}; the vocabulary has {vocab_size} tokens, counted from 0")]
    BiasedToken {
        /// The token ID.
        token: u32,
        /// The number of tokens of the vocabulary.
        vocab_size: usize,
    },
    /// Logits from which no token can be chosen.
    #[error(
        "no token can be chosen: a logit is NaN or infinite, or all are minus infinity or suppressed; are the weights broken, or the activations \
         too large for their dtype?"
    )]
    NoToken,
}

impl Sampling {
    /// Options that always choose the most likely token.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: None,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
    };

    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`SamplingError::Option`], with the option's name.
    pub fn validate(&self) -> Result<(), SamplingError> {
        let check = |option, found: f32, ok, expected| {
            if ok {
                Ok(())
            } else {
                Err(SamplingError::Option {
                    option,
                    found,
                    expected,
                })
            }
        };
        let Self {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
        } = *self;
        check(
            "temperature",
            temperature,
            temperature.is_finite() && temperature >= 0.0,
            "0 or a positive number",
        )?;
        check("top_k", 0.0, top_k != Some(0), "at least 1")?;
        check(
            "top_p",
            top_p,
            top_p > 0.0 && top_p <= 1.0,
            "above 0 and at most 1",
        )?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1")?;
        for (option, penalty) in [
            ("presence_penalty", presence_penalty),
            ("frequency_penalty", frequency_penalty),
        ] {
            check(option, penalty, penalty.is_finite(), "a finite number")?;
        }
        check(
            "repetition_penalty",
            repetition_penalty,
            repetition_penalty.is_finite() && repetition_penalty > 0.0,
            "a positive number",
        )
    }

    /// Creates the row of a step for a sequence whose `token` is at `position` of `slot`, without
    /// suppressed tokens, biases and log probabilities.
    pub(crate) fn row(&self, token: u32, position: u32, slot: u32, seed: u64) -> SequenceState {
        SequenceState {
            token,
            status: SequenceStatus::At(position),
            slot,
            seed: (seed ^ seed >> 32) as u32,
            top_k: self
                .top_k
                .map_or(0, |k| u32::try_from(k).unwrap_or(u32::MAX)),
            temperature: self.temperature,
            top_p: self.top_p,
            repetition_penalty: self.repetition_penalty,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            ..SequenceState::IDLE
        }
    }
}

impl Default for Sampling {
    /// Returns [`GREEDY`](Self::GREEDY).
    fn default() -> Self {
        Self::GREEDY
    }
}

#[cfg(test)]
mod tests;
