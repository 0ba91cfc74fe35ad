//! The limits of a scheduler, and what is refused.

use super::request::Request;

/// The limits of a [`Scheduler`](super::Scheduler).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The number of pages in the pool.
    pub pages: u32,
    /// The positions in a page; by default 64.
    pub page_size: usize,
    /// The most sequences that run at once; by default 64.
    pub max_sequences: usize,
    /// The most tokens in a step, prefill and decode together; by default 2048. At least
    /// `max_sequences`, so that prompts always get on beside decode rows.
    pub max_step_tokens: usize,
    /// The most requests that wait, not counting those that were pre-empted; by default 1024.
    pub max_waiting: usize,
    /// True to share out service evenly among the [keys](Request::key) of each priority, instead of
    /// first come, first served; by default false.
    ///
    /// Every key has a counter of the tokens that were computed for it, of which a generated token
    /// counts twice. The next request is the oldest of the key with the least counter. A key that
    /// had no requests starts at the least counter of those that have, so it cannot save up service
    /// (the Virtual Token Counter of "Fairness in Serving Large Language Models", 2024).
    pub fair: bool,
}

impl SchedulerConfig {
    /// Makes a configuration with a number of pages, and defaults for the rest.
    pub fn new(pages: u32) -> Self {
        Self {
            pages,
            page_size: 64,
            max_sequences: 64,
            max_step_tokens: 2048,
            max_waiting: 1024,
            fair: false,
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        for (name, value) in [
            ("pages", self.pages as usize),
            ("page_size", self.page_size),
            ("max_sequences", self.max_sequences),
            ("max_waiting", self.max_waiting),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { name });
            }
        }
        if self.max_step_tokens < self.max_sequences {
            return Err(ConfigError::StepTooSmall {
                max_step_tokens: self.max_step_tokens,
                max_sequences: self.max_sequences,
            });
        }
        Ok(())
    }

    /// Returns an error if a request could never run.
    pub(super) fn check_request(&self, request: &Request) -> Result<(), SubmitError> {
        let (prompt, max_tokens) = (request.prompt.len(), request.max_tokens);
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if max_tokens == 0 {
            return Err(SubmitError::NoTokens);
        }
        // The keys and values of the last token are never needed.
        let needed = (prompt.saturating_add(max_tokens) - 1).div_ceil(self.page_size);
        if needed > self.pages as usize {
            return Err(SubmitError::TooLarge {
                prompt,
                max_tokens,
                needed,
                pages: self.pages,
                page_size: self.page_size,
            });
        }
        Ok(())
    }
}

/// A configuration with which nothing could run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A limit of 0.
    #[error("{name} is 0; it must be at least 1")]
    Zero {
        /// The name of the limit.
        name: &'static str,
    },
    /// A step without room for a token of each sequence.
    #[error(
        "max_step_tokens is {max_step_tokens}, less than max_sequences, {max_sequences}; each \
         running sequence needs a token of a step"
    )]
    StepTooSmall {
        /// The most tokens in a step.
        max_step_tokens: usize,
        /// The most sequences that run at once.
        max_sequences: usize,
    },
}

/// A request that is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// A prompt without tokens.
    #[error("the prompt has no tokens; it must have at least one")]
    EmptyPrompt,
    /// A request for no tokens.
    #[error("max_tokens is 0; it must be at least 1")]
    NoTokens,
    /// A waiting queue that is full.
    #[error("{max_waiting} requests are waiting, which is the limit; try again later")]
    QueueFull {
        /// The most requests that wait.
        max_waiting: usize,
    },
    /// A request that needs more pages than there are.
    #[error(
        "a prompt of {prompt} tokens and up to {max_tokens} new ones need {needed} pages of \
         {page_size} positions, and the KV cache has {pages}; shorten the prompt or ask for fewer \
         tokens"
    )]
    TooLarge {
        /// The tokens of the prompt.
        prompt: usize,
        /// The most new tokens.
        max_tokens: usize,
        /// The pages that the request needs.
        needed: usize,
        /// The pages in the pool.
        pages: u32,
        /// The positions in a page.
        page_size: usize,
    },
}
