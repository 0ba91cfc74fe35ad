//! Requests, and what becomes of them.

use std::time::Duration;

/// A request: a prompt, and how many tokens are generated after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The token IDs of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// The most tokens that are generated, at least one.
    pub max_tokens: usize,
    /// The priority; a higher one goes first.
    pub priority: i32,
    /// The client among which service is shared out evenly if
    /// [`fair`](super::SchedulerConfig::fair) is set.
    pub key: u64,
    /// The longest time until the request first leaves the waiting queue; not limited if `None`.
    pub queue_timeout: Option<Duration>,
    /// The longest time until the request ends; not limited if `None`.
    pub timeout: Option<Duration>,
}

impl Request {
    /// Makes a request of priority 0 and key 0, without time-outs.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            max_tokens,
            priority: 0,
            key: 0,
            queue_timeout: None,
            timeout: None,
        }
    }
}

/// A request by its number; later requests have higher ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

/// Something that happened to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The request.
    pub request: RequestId,
    /// What happened.
    pub kind: EventKind,
}

/// What happened to a request. The last event of every request is `Finished` or `Failed`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// The first token was generated.
    FirstToken(u32),
    /// A further token was generated.
    Token(u32),
    /// The pages of the sequence were needed by others. It is computed anew later, and goes on
    /// after its last token.
    Preempted,
    /// The request ended as it should.
    Finished(FinishReason),
    /// The request ended before it was complete.
    Failed(FailReason),
}

/// The reason why a request ended as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The executor reported the last token as a [stop](super::Outcome::Stop).
    Stop,
    /// The request has its [`max_tokens`](Request::max_tokens).
    Length,
    /// The request was cancelled.
    Cancelled,
}

/// The reason why a request ended before it was complete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FailReason {
    /// The request was in the waiting queue for its
    /// [`queue_timeout`](Request::queue_timeout).
    #[error("the request was still waiting after {}s; try again later", .0.as_secs_f64())]
    QueueTimeout(Duration),
    /// The request was not complete after its [`timeout`](Request::timeout).
    #[error(
        "the request was not complete after {}s; ask for fewer tokens or allow more time",
        .0.as_secs_f64())]
    Timeout(Duration),
    /// The executor failed to compute a row of the request.
    #[error("the request could not be computed: {0}")]
    Executor(String),
}
