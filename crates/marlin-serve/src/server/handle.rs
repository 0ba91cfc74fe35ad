//! The side of a server that other threads hold.

use super::ServerOptions;
use super::clock::Clock;
use super::error::SubmitError;
use super::event::{EventStream, FailReason, TokenEvent, Usage};
use super::executor::Capabilities;
use super::metrics::ServerMetrics;
use super::params::GenerationRequest;
use futures_channel::{mpsc, oneshot};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A message to the thread of a server.
#[derive(Debug)]
pub(super) enum Command {
    Submit(Box<Submission>),
    /// The reader of the request with this ticket went away.
    Cancel(u64),
    /// All requests end at this time, and no more come.
    Shutdown(Duration),
}

/// A request on its way to the thread.
#[derive(Debug)]
pub(super) struct Submission {
    pub ticket: u64,
    pub request: GenerationRequest,
    pub max_tokens: usize,
    pub arrival: Duration,
    pub events: mpsc::Sender<TokenEvent>,
    /// True for a request of the server itself, which finds out whether steps succeed again.
    pub is_trial: bool,
}

/// How a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Health {
    /// The server takes requests, and the last step succeeded.
    Ok,
    /// The server takes requests, but the executor failed in the last step, for this reason.
    /// Without requests, the server [tries](super::ServerOptions::retry) further steps by itself.
    StepFailed(String),
    /// The server takes no more requests, and completes those that it has.
    ShuttingDown,
    /// The server was shut down, and its thread has ended.
    Stopped,
    /// The device was lost or the server's thread panicked, and all requests have failed.
    Failed(String),
}

/// What the handles and streams share with the thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub options: ServerOptions,
    pub capabilities: Capabilities,
    pub clock: Clock,
    next_ticket: AtomicU64,
    /// The requests that were submitted and have not left the waiting queue for the first time.
    waiting: AtomicUsize,
    health: Mutex<Health>,
    metrics: Mutex<ServerMetrics>,
    /// Those who wait for the end of the thread; `None` after it.
    waiters: Mutex<Option<Vec<oneshot::Sender<()>>>>,
}

/// A server, to which any thread can submit requests. Clones are handles of the same server.
///
/// The server ends when it is [shut down](Self::shutdown), or when all handles and all streams are
/// dropped. A program that ends right afterwards shuts it down and waits until it has
/// [stopped](Self::stopped): some drivers crash if the device is in use at the end of the process.
#[derive(Debug, Clone)]
pub struct ServerHandle {
    commands: Sender<Command>,
    shared: Arc<Shared>,
}

impl ServerHandle {
    pub(super) fn new(commands: Sender<Command>, shared: Arc<Shared>) -> Self {
        Self { commands, shared }
    }

    /// Submits a request, without waiting. The events come from the stream; dropping it cancels the
    /// request.
    ///
    /// # Errors
    /// If a parameter is outside its range or not supported by the executor, the sequence would be
    /// longer than the model's window or the KV cache, the waiting queue is full, or the server is
    /// shutting down or has failed.
    pub fn submit(&self, request: GenerationRequest) -> Result<EventStream, SubmitError> {
        let shared = &self.shared;
        let prompt_tokens = request.prompt.len();
        let max_tokens = self.check(&request)?;
        match self.health() {
            Health::Ok | Health::StepFailed(_) => {}
            Health::ShuttingDown | Health::Stopped => return Err(SubmitError::ShuttingDown),
            Health::Failed(reason) => return Err(SubmitError::ServerFailed(reason)),
        }
        let max_waiting = shared.options.scheduler.max_waiting;
        shared
            .waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |waiting| {
                (waiting < max_waiting).then_some(waiting + 1)
            })
            .map_err(|_| SubmitError::QueueFull { max_waiting })?;
        // A channel has a place for each sender besides its buffer.
        let (sender, receiver) = mpsc::channel(shared.options.event_buffer - 1);
        let ticket = shared.next_ticket.fetch_add(1, Ordering::Relaxed);
        let submission = Submission {
            ticket,
            request,
            max_tokens,
            arrival: shared.clock.now(),
            events: sender,
            is_trial: false,
        };
        let command = Command::Submit(Box::new(submission));
        if self.commands.send(command).is_err() {
            shared.left_queue();
            return Err(match shared.end_of_requests() {
                FailReason::Server(reason) => SubmitError::ServerFailed(reason),
                _ => SubmitError::ShuttingDown,
            });
        }
        Ok(EventStream {
            events: receiver,
            ticket,
            usage: Usage {
                prompt_tokens,
                ..Usage::default()
            },
            commands: self.commands.clone(),
            shared: Arc::clone(shared),
            ended: false,
        })
    }

    /// Returns the most tokens that are generated, if the request can run.
    fn check(&self, request: &GenerationRequest) -> Result<usize, SubmitError> {
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        request.check(self.capabilities())?;
        let window = self.shared.capabilities.max_len;
        let capacity = self.shared.options.capacity();
        let max_tokens = request.max_tokens.unwrap_or_else(|| {
            let room = window.min(capacity).saturating_sub(prompt);
            room.max(1)
        });
        let len = prompt.saturating_add(max_tokens);
        if len > window {
            return Err(SubmitError::ContextLength {
                prompt,
                max_tokens,
                window,
            });
        }
        if len > capacity {
            return Err(SubmitError::CacheCapacity {
                prompt,
                max_tokens,
                capacity,
            });
        }
        Ok(max_tokens)
    }

    /// Returns what the executor can compute.
    pub fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    /// Returns the options of the server.
    pub fn options(&self) -> &ServerOptions {
        &self.shared.options
    }

    /// Returns the most tokens of a sequence, those of the prompt and the generated ones together,
    /// for which the model's window and the KV cache have room.
    pub fn max_len(&self) -> usize {
        let capacity = self.shared.options.capacity();
        self.shared.capabilities.max_len.min(capacity)
    }

    /// Returns how the server is.
    pub fn health(&self) -> Health {
        lock(&self.shared.health).clone()
    }

    /// Returns the figures of the server as of the end of the last step.
    pub fn metrics(&self) -> ServerMetrics {
        lock(&self.shared.metrics).clone()
    }

    /// Shuts the server down, without waiting: it takes no more requests, and completes those that
    /// it has. Requests that are not complete after `deadline` fail with
    /// [`FailReason::ShutDown`]. A later call can bring the deadline forward, not put it off.
    pub fn shutdown(&self, deadline: Duration) {
        let shared = &self.shared;
        shared.set_health(Health::ShuttingDown);
        let end = shared.clock.now().saturating_add(deadline);
        // If the thread has ended, there is nothing to shut down.
        let _ = self.commands.send(Command::Shutdown(end));
    }

    /// Waits until the server has ended: after a [shutdown](Self::shutdown), or because it failed.
    /// [`health`](Self::health) says which.
    pub async fn stopped(&self) {
        let receiver = match lock(&self.shared.waiters).as_mut() {
            None => return,
            Some(waiters) => {
                let (sender, receiver) = oneshot::channel();
                waiters.push(sender);
                receiver
            }
        };
        // It is an error if the sender is dropped, which says the same.
        let _ = receiver.await;
    }
}

impl Shared {
    pub fn new(options: ServerOptions, capabilities: Capabilities) -> Self {
        let pages = options.scheduler.pages as usize;
        Self {
            metrics: Mutex::new(ServerMetrics::new(pages, capabilities.max_len)),
            options,
            capabilities,
            clock: Clock::start(),
            next_ticket: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            health: Mutex::new(Health::Ok),
            waiters: Mutex::new(Some(Vec::new())),
        }
    }

    /// Returns a request for one token after one token, whose events nobody reads, and counts it
    /// into the waiting queue.
    pub fn trial(&self) -> Submission {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let (events, _) = mpsc::channel(0);
        Submission {
            ticket: self.next_ticket.fetch_add(1, Ordering::Relaxed),
            request: GenerationRequest::new(vec![0]),
            max_tokens: 1,
            arrival: self.clock.now(),
            events,
            is_trial: true,
        }
    }

    /// Counts a request that left the waiting queue.
    pub fn left_queue(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn metrics(&self) -> MutexGuard<'_, ServerMetrics> {
        lock(&self.metrics)
    }

    /// Sets the health, unless it is worse already.
    pub fn set_health(&self, new: Health) {
        let rank = |health: &Health| match health {
            Health::Ok | Health::StepFailed(_) => 0,
            Health::ShuttingDown => 1,
            Health::Stopped => 2,
            Health::Failed(_) => 3,
        };
        let mut health = lock(&self.health);
        if rank(&new) >= rank(&health) {
            *health = new;
        }
    }

    /// Returns the reason for which requests fail whose server has ended.
    pub fn end_of_requests(&self) -> FailReason {
        match &*lock(&self.health) {
            Health::Failed(reason) => FailReason::Server(reason.clone()),
            _ => FailReason::ShutDown,
        }
    }

    /// Notes that the thread has ended, and wakes those who wait for that.
    pub fn stop(&self) {
        self.set_health(Health::Stopped);
        let waiters = lock(&self.waiters).take();
        for sender in waiters.into_iter().flatten() {
            // Whoever waited may have gone.
            let _ = sender.send(());
        }
    }
}

/// Locks a mutex whose value is valid at all times.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
