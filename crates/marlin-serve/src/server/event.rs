//! What comes back.

use super::executor::TokenLogprobs;
use super::handle::{Command, Shared};
use crate::scheduler;
use futures_channel::mpsc;
use futures_core::{FusedStream, Stream};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// An event of a request. The last one is `End` or `Failed`, and there is exactly one of these.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenEvent {
    /// A token was generated.
    Token {
        /// The token ID.
        token: u32,
        /// The text that the token completes: whole characters, without what may still become a
        /// stop string. It is empty if there is none; the texts of all events together are the
        /// text.
        text: String,
        /// The log probabilities, if the request asks for them.
        logprobs: Option<TokenLogprobs>,
        /// True if the token completes the request: [`End`](TokenEvent::End) follows at once, and a
        /// reader may wait for it to pass both on together.
        is_last: bool,
    },
    /// The request is complete.
    End {
        /// The reason why no more tokens are generated.
        reason: EndReason,
        /// The tokens of the request.
        usage: Usage,
    },
    /// The request ended before it was complete.
    Failed {
        /// The reason.
        reason: FailReason,
        /// The tokens of the request so far.
        usage: Usage,
    },
}

/// The reason why a complete request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndReason {
    /// The model ended the sequence with an end-of-sequence token, which is the last
    /// [token](TokenEvent::Token).
    EndOfSequence,
    /// One of the request's [`stop_token_ids`](super::GenerationRequest::stop_token_ids) came,
    /// which is the last [token](TokenEvent::Token).
    StopToken(u32),
    /// One of the request's [`stop`](super::GenerationRequest::stop) strings came.
    StopString(String),
    /// The text is complete, and the request's [`grammar`](super::GenerationRequest::grammar)
    /// allows nothing more.
    Grammar,
    /// The request has its [`max_tokens`](super::GenerationRequest::max_tokens).
    Length,
}

/// The reason why a request ended before it was complete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FailReason {
    /// The request was in the waiting queue for its
    /// [`queue_timeout`](super::GenerationRequest::queue_timeout).
    #[error("the request was still waiting after {}s; try again later", .0.as_secs_f64())]
    QueueTimeout(Duration),
    /// The request was not complete after its [`timeout`](super::GenerationRequest::timeout).
    #[error(
        "the request was not complete after {}s; ask for fewer tokens or allow more time",
        .0.as_secs_f64())]
    Timeout(Duration),
    /// The executor failed to compute a step with the request.
    #[error("the request could not be computed: {0}")]
    Executor(String),
    /// The tokenizer failed to decode the tokens.
    #[error("the text of the request could not be decoded: {0}")]
    Text(String),
    /// The text could not be continued according to the request's
    /// [`grammar`](super::GenerationRequest::grammar).
    #[error("the text cannot be continued according to its grammar: {0}")]
    Grammar(String),
    /// [`event_buffer`](super::ServerOptions::event_buffer) events were not read.
    #[error("{buffer} events of the request were not read in time")]
    SlowReader {
        /// The most events that are kept.
        buffer: usize,
    },
    /// The server was shut down, and the request was not complete at its deadline.
    #[error("the server was shut down before the request was complete")]
    ShutDown,
    /// The server has failed: its device was lost, or its thread panicked.
    #[error("the server has failed: {0}")]
    Server(String),
}

impl From<scheduler::FailReason> for FailReason {
    fn from(reason: scheduler::FailReason) -> Self {
        match reason {
            scheduler::FailReason::QueueTimeout(time) => Self::QueueTimeout(time),
            scheduler::FailReason::Timeout(time) => Self::Timeout(time),
            scheduler::FailReason::Executor(reason) => Self::Executor(reason),
        }
    }
}

/// The tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// The tokens of the prompt.
    pub prompt_tokens: usize,
    /// The tokens of the prompt whose keys and values were in the KV cache already.
    pub cached_tokens: usize,
    /// The tokens that were generated, one that ended the sequence included.
    pub completion_tokens: usize,
}

/// The events of a request, as they come. Dropping it cancels the request within one step.
///
/// At most [`event_buffer`](super::ServerOptions::event_buffer) events wait to be read. A request
/// whose reader falls behind by more fails with [`FailReason::SlowReader`]; others go on.
#[derive(Debug)]
pub struct EventStream {
    pub(super) events: mpsc::Receiver<TokenEvent>,
    pub(super) ticket: u64,
    pub(super) usage: Usage,
    pub(super) commands: Sender<Command>,
    pub(super) shared: Arc<Shared>,
    /// True after the last event.
    pub(super) ended: bool,
}

impl Stream for EventStream {
    type Item = TokenEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<TokenEvent>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = ready!(Pin::new(&mut self.events).poll_next(context));
        // The thread ended without an event, as it does if it fails right after a request came.
        let event = event.unwrap_or_else(|| TokenEvent::Failed {
            reason: self.shared.end_of_requests(),
            usage: self.usage,
        });
        match event {
            TokenEvent::Token { .. } => self.usage.completion_tokens += 1,
            TokenEvent::End { .. } | TokenEvent::Failed { .. } => self.ended = true,
        }
        Poll::Ready(Some(event))
    }
}

impl FusedStream for EventStream {
    fn is_terminated(&self) -> bool {
        self.ended
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        if !self.ended {
            // If the thread has ended, the request has, too.
            let _ = self.commands.send(Command::Cancel(self.ticket));
        }
    }
}
