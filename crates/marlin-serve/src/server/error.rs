//! The errors of a server.

use super::params::ParamError;
use crate::scheduler::ConfigError;

/// A request that is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// A prompt without tokens.
    #[error("the prompt has no tokens; it must have at least one")]
    EmptyPrompt,
    /// A parameter that a request cannot have.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// A sequence that is longer than the model's window.
    #[error(
        "a prompt of {prompt} tokens and up to {max_tokens} new ones are longer than the model's \
         window of {window} tokens; shorten the prompt or ask for fewer tokens"
    )]
    ContextLength {
        /// The tokens of the prompt.
        prompt: usize,
        /// The new tokens that are asked for, at least 1.
        max_tokens: usize,
        /// The most tokens of a sequence.
        window: usize,
    },
    /// A sequence that is longer than the whole KV cache.
    #[error(
        "a prompt of {prompt} tokens and up to {max_tokens} new ones do not fit in the KV cache, \
         which has room for {capacity}; shorten the prompt, ask for fewer tokens, or give the \
         server a larger KV cache"
    )]
    CacheCapacity {
        /// The tokens of the prompt.
        prompt: usize,
        /// The new tokens that are asked for, at least 1.
        max_tokens: usize,
        /// The most tokens of a sequence for which the KV cache has room.
        capacity: usize,
    },
    /// A waiting queue that is full.
    #[error("{max_waiting} requests are waiting, which is the limit; try again later")]
    QueueFull {
        /// The most requests that wait.
        max_waiting: usize,
    },
    /// A server that is shutting down, or has been.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// A server that has failed: its device was lost, or its thread panicked.
    #[error("the server has failed: {0}")]
    ServerFailed(String),
}

/// A server that cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The limits of the scheduler are not valid.
    #[error("the limits of the scheduler")]
    Config(#[from] ConfigError),
    /// Event streams without a buffer.
    #[error("event_buffer is 0; it must be at least 1")]
    EventBuffer,
    /// The thread could not be started.
    #[error("the thread of the server cannot be started")]
    Thread(#[source] std::io::Error),
}
