//! The state of a request.

use super::request::{FailReason, Request, RequestId};
use super::step::PageTable;
use std::cmp::Reverse;
use std::time::Duration;

/// The place of a sequence among others: by priority, then by arrival. The least is the first to be
/// served and the last to be pre-empted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub priority: Reverse<i32>,
    pub request: RequestId,
}

/// A request with its tokens and pages.
///
/// Positions `0..computed` have their keys and values, those up to `scheduled` get them from steps
/// in flight. `computed <= scheduled <= tokens.len() + 1`: with a step in flight, the position
/// after the last known token can be scheduled.
#[derive(Debug)]
pub(super) struct Sequence {
    pub rank: Rank,
    pub key: u64,
    /// The prompt and the generated tokens that are known.
    pub tokens: Vec<u32>,
    /// The number of tokens in the prompt.
    pub prompt: usize,
    /// The most tokens, the prompt included.
    pub max_len: usize,
    /// The number of tokens at the last admission, which are computed by prefill.
    pub prefill: usize,
    pub pages: PageTable,
    pub scheduled: usize,
    pub computed: usize,
    /// The last step that has a row of the sequence.
    pub last_step: Option<u64>,
    /// True if the sequence is pre-empted as soon as its step in flight is complete.
    pub preempting: bool,
    /// The time-out of the waiting queue with its end; `None` once the request was admitted.
    pub queue_timeout: Option<Timeout>,
    pub timeout: Option<Timeout>,
}

/// A time-out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Timeout {
    /// The time at which it ends.
    pub end: Duration,
    /// The length of the time-out.
    pub length: Duration,
}

impl Timeout {
    /// Returns the time-out that starts now; `None` if there is none, or it never ends.
    fn start(now: Duration, length: Option<Duration>) -> Option<Self> {
        let length = length?;
        let end = now.checked_add(length)?;
        Some(Self { end, length })
    }
}

impl Sequence {
    pub fn new(id: RequestId, request: Request, now: Duration) -> Self {
        let prompt = request.prompt.len();
        Self {
            rank: Rank {
                priority: Reverse(request.priority),
                request: id,
            },
            key: request.key,
            tokens: request.prompt,
            prompt,
            max_len: prompt + request.max_tokens,
            prefill: prompt,
            pages: PageTable::default(),
            scheduled: 0,
            computed: 0,
            last_step: None,
            preempting: false,
            queue_timeout: Timeout::start(now, request.queue_timeout),
            timeout: Timeout::start(now, request.timeout),
        }
    }

    /// Returns true if a part of the prompt is not in a step yet.
    pub fn prefills(&self) -> bool {
        !self.preempting && self.scheduled < self.prefill
    }

    /// Returns true if the sequence can be in a step with a decode row: its prompt is computed or
    /// in flight, and the steps in flight do not generate its last token.
    pub fn decodes(&self) -> bool {
        !self.preempting && self.scheduled >= self.prefill && self.scheduled + 1 < self.max_len
    }

    /// Returns when the first time-out ends.
    pub fn deadline(&self) -> Option<Duration> {
        let ends = [self.queue_timeout, self.timeout];
        ends.into_iter().flatten().map(|timeout| timeout.end).min()
    }

    /// Returns why the sequence fails at a time, if a time-out has ended.
    pub fn timed_out(&self, now: Duration) -> Option<FailReason> {
        let ended = |timeout: &Timeout| timeout.end <= now;
        let queue = self.queue_timeout.filter(ended);
        let total = self.timeout.filter(ended);
        queue
            .map(|timeout| FailReason::QueueTimeout(timeout.length))
            .or(total.map(|timeout| FailReason::Timeout(timeout.length)))
    }
}
