//! The engine of an LLM server as a library: requests in, streams of tokens and text out.
//!
//! [`Server::start`] starts a thread, which owns a [`Scheduler`] and an
//! [`Executor`] and runs steps as long as there are requests. It knows no protocol and no async
//! runtime: [`ServerHandle::submit`] never waits, and an [`EventStream`] is a
//! [`Stream`](futures_core::Stream), which any runtime polls.
//!
//! # A request
//!
//! 1. [`submit`](ServerHandle::submit) checks a [`GenerationRequest`] and refuses it at once with a
//!    [`SubmitError`] if it can never run, or if the waiting queue is full.
//! 2. When it leaves the waiting queue, the executor [takes its sequence in](Executor::add).
//! 3. Each token comes as a [`TokenEvent::Token`], with the text that it completes. A character may
//!    span tokens, and a stop string, too: what may still become one is held back, so that no part
//!    of a stop string is ever in the text.
//! 4. The last event is [`TokenEvent::End`] or [`TokenEvent::Failed`], once for each stream.
//!
//! | the request ends | by |
//! |---|---|
//! | [`EndReason::EndOfSequence`] | one of [`ServerOptions::eos_tokens`], unless it [ignores](GenerationRequest::ignore_eos) them |
//! | [`EndReason::StopToken`] | one of [`GenerationRequest::stop_token_ids`] |
//! | [`EndReason::StopString`] | one of [`GenerationRequest::stop`], whichever is complete first; of those that are complete with the same character, the one that begins first |
//! | [`EndReason::Grammar`] | the end of [`GenerationRequest::grammar`], without an end-of-sequence token |
//! | [`EndReason::Length`] | [`GenerationRequest::max_tokens`] |
//! | [`FailReason`] | a time-out, a failure, a slow reader, a shutdown |
//! | no event | its stream was dropped |
//!
//! A dropped stream cancels its request: no step that is started from then on has a row of it. A
//! reader that is slow never holds up the others: it has a bounded buffer, and when that is full,
//! its request is cancelled, and fails with [`FailReason::SlowReader`] after what is in the buffer.
//! It is not paused, because it would keep its pages meanwhile.
//!
//! # Failures
//!
//! - A row [fails](RowOutput::Failed): its request fails.
//! - A step [fails](ExecutorError::Call): the requests with a row in it fail, the others go on.
//!   [`health`](ServerHandle::health) is [`Health::StepFailed`] until a step succeeds. A server
//!   without requests tries a step of one token by itself, [a while](ServerOptions::retry) after the
//!   failure: a router sends no requests to a server that says that it fails.
//! - The [device is lost](ExecutorError::Lost), or the thread panics: all requests fail, and the
//!   server ends. `health` is [`Health::Failed`].
//!
//! # Steps
//!
//! If the executor [runs ahead](Executor::runs_ahead), the host schedules and starts step n+1 while
//! the device runs step n, and decodes the text of step n while it runs step n+1. The mask of a row
//! with a grammar follows from the token of step n: it is computed while the device runs the layers
//! of step n+1, and [given](Executor::mask) before that samples.

mod clock;
mod error;
mod event;
mod executor;
mod handle;
mod live;
mod metrics;
mod params;
mod record;
mod stop;
mod text;
mod thread;

pub use self::error::{StartError, SubmitError};
pub use self::event::{EndReason, EventStream, FailReason, TokenEvent, Usage};
pub use self::executor::{
    Capabilities, Executor, ExecutorError, NewSequence, RowOutput, TokenLogprobs, TokenMask,
};
pub use self::handle::{Health, ServerHandle};
pub use self::metrics::{EndCounts, Histogram, ServerMetrics};
pub use self::params::{GenerationRequest, ParamError, SamplingParams};

use self::handle::{Command, Shared};
use self::thread::ServerThread;
use crate::scheduler::{Scheduler, SchedulerConfig};
use marlin_text::Tokenizer;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// The options of a [`Server`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerOptions {
    /// The limits of the scheduler. The pages are those that the executor has.
    pub scheduler: SchedulerConfig,
    /// The tokens that end a sequence, as the model's configuration says.
    pub eos_tokens: Vec<u32>,
    /// The most events of a request that wait to be read; by default 1024.
    pub event_buffer: usize,
    /// The time from a failed step to a trial: a step of one token that the server computes while
    /// it has no requests, so that its [health](ServerHandle::health) follows the device. It
    /// doubles with each further failure, 5 times at most; by default one second. The figures of
    /// requests do not count trials.
    pub retry: Duration,
}

impl ServerOptions {
    /// Makes options with defaults, without end-of-sequence tokens.
    pub fn new(scheduler: SchedulerConfig) -> Self {
        Self {
            scheduler,
            eos_tokens: Vec::new(),
            event_buffer: 1024,
            retry: Duration::from_secs(1),
        }
    }

    /// Returns the most tokens of a sequence for which the KV cache has room. The keys and values
    /// of the last token are never needed.
    fn capacity(&self) -> usize {
        let positions = (self.scheduler.pages as usize).saturating_mul(self.scheduler.page_size);
        positions.saturating_add(1)
    }
}

/// Starts servers. See the [module's documentation](self).
#[derive(Debug)]
pub struct Server;

impl Server {
    /// Starts a thread that serves requests with an executor.
    ///
    /// Calls of clones of a tokenizer wait for each other. A program that encodes long prompts
    /// meanwhile opens another [`Tokenizer`] of the same file for that.
    ///
    /// # Errors
    /// If a limit is 0, a step has fewer tokens than there are sequences, or the thread cannot be
    /// started.
    pub fn start<E: Executor>(
        executor: E,
        tokenizer: Tokenizer,
        options: ServerOptions,
    ) -> Result<ServerHandle, StartError> {
        let scheduler = Scheduler::new(options.scheduler.clone())?;
        if options.event_buffer == 0 {
            return Err(StartError::EventBuffer);
        }
        let (sender, commands) = mpsc::channel();
        let shared = Arc::new(Shared::new(options, executor.capabilities()));
        let handle = ServerHandle::new(sender, Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("marlin-serve".into());
        thread
            .spawn(move || serve(executor, &tokenizer, scheduler, commands, &shared))
            .map_err(StartError::Thread)?;
        Ok(handle)
    }
}

/// Serves requests until the server ends.
fn serve<E: Executor>(
    executor: E,
    tokenizer: &Tokenizer,
    scheduler: Scheduler,
    commands: Receiver<Command>,
    shared: &Shared,
) {
    // Dropped last, when the executor has given its memory back.
    let _end = EndOfThread(shared);
    let max_steps = if executor.runs_ahead() { 2 } else { 1 };
    let mut thread = ServerThread::new(executor, max_steps, tokenizer, scheduler, commands, shared);
    let failure = match catch_unwind(AssertUnwindSafe(|| thread.run())) {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(panic) => Some(format!("its thread panicked: {}", message(panic.as_ref()))),
    };
    let reason = match failure {
        None => FailReason::ShutDown,
        Some(reason) => {
            tracing::error!("the server has failed: {reason}");
            shared.set_health(Health::Failed(reason.clone()));
            FailReason::Server(reason)
        }
    };
    thread.fail_all(&reason);
}

/// Says that the thread has ended, when it is dropped.
struct EndOfThread<'a>(&'a Shared);

impl Drop for EndOfThread<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Returns the message that a panic was raised with.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}
