//! Continuous batching: which tokens of which requests each step computes.

mod cache;
mod check;
mod config;
mod fairness;
mod queue;
mod request;
mod schedule;
mod sequence;
mod step;
#[cfg(test)]
mod tests;

use self::cache::PageCache;
use self::queue::Queue;
use self::sequence::{Rank, Sequence};
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

pub use self::config::{ConfigError, SchedulerConfig, SubmitError};
pub use self::request::{Event, EventKind, FailReason, FinishReason, Request, RequestId};
pub use self::step::{DecodeRow, Outcome, PageTable, PrefillChunk, Step};

/// Figures of a [`Scheduler`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Metrics {
    /// The sequences that are running.
    pub running: usize,
    /// The requests that are waiting, the pre-empted ones included.
    pub waiting: usize,
    /// The pages that sequences or steps in flight use.
    pub used_pages: usize,
    /// The pages of prefixes that nothing uses, which can be evicted. The other pages are free.
    pub cached_pages: usize,
    /// The tokens, since the start, that were not computed because their prefix was cached.
    pub prefix_hit_tokens: u64,
    /// The tokens, since the start, that were put in prefill chunks.
    pub prefill_tokens: u64,
    /// The tokens, since the start, that were generated.
    pub generated_tokens: u64,
    /// The pre-emptions since the start.
    pub preemptions: u64,
}

/// Decides what each step of the model computes.
///
/// The [crate's documentation](crate) says how a step flows. Time is the duration since any fixed
/// moment, which the caller passes; it never goes backwards.
///
/// Among requests of equal priority, the first come is the first to leave the queue, and the last
/// to be pre-empted; with [`fair`](SchedulerConfig::fair), keys take turns in leaving the queue. A
/// request that is next but does not fit yet is not overtaken by smaller ones.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    cache: PageCache,
    queue: Queue,
    /// All requests that have not ended: waiting, running or pre-empted.
    sequences: HashMap<RequestId, Sequence>,
    /// The sequences with pages.
    running: BTreeSet<Rank>,
    /// The time at which the next time-out of each request ends.
    deadlines: BTreeSet<(Duration, RequestId)>,
    next_request: u64,
    next_step: u64,
    events: Vec<Event>,
    /// The counts since the start.
    counts: Metrics,
}

impl Scheduler {
    /// Makes a scheduler with an empty KV cache.
    ///
    /// # Errors
    /// If a limit is 0, or a step has fewer tokens than there are sequences.
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            cache: PageCache::new(config.pages, config.page_size),
            queue: Queue::new(config.fair),
            sequences: HashMap::new(),
            running: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            next_request: 0,
            next_step: 0,
            events: Vec::new(),
            counts: Metrics::default(),
            config,
        })
    }

    /// Puts a request in the waiting queue.
    ///
    /// # Errors
    /// If the request asks for nothing, needs more pages than the pool has, or the queue is full.
    pub fn submit(&mut self, request: Request, now: Duration) -> Result<RequestId, SubmitError> {
        self.config.check_request(&request)?;
        let max_waiting = self.config.max_waiting;
        if self.queue.new_len() >= max_waiting {
            return Err(SubmitError::QueueFull { max_waiting });
        }
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let sequence = Sequence::new(id, request, now);
        self.queue.push(&sequence);
        self.deadlines
            .extend(sequence.deadline().map(|deadline| (deadline, id)));
        self.sequences.insert(id, sequence);
        Ok(id)
    }

    /// Cancels a request, which ends at once: later steps have no row of it, and what steps in
    /// flight compute for it is ignored. Returns false if it is not there, or has ended.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        self.end(request, EventKind::Finished(FinishReason::Cancelled))
    }

    /// Ends a step in flight, the first of them. `outcomes` has one entry for each prefill chunk of
    /// the step and then one for each decode row. Returns all [events](Self::take_events).
    ///
    /// # Panics
    /// If an earlier step is in flight, or `outcomes` does not fit the step: another number of
    /// entries, a token for a chunk that does not end its prompt, or none for another row.
    pub fn complete(&mut self, step: Step, outcomes: Vec<Outcome>, now: Duration) -> Vec<Event> {
        let chunks = step.prefill.iter();
        let chunks = chunks.map(|c| (c.request, c.start + c.tokens.len(), c.ends_prompt));
        let rows = step.decode.iter();
        let rows = rows.map(|row| (row.request, row.position + 1, true));
        assert_eq!(
            outcomes.len(),
            step.prefill.len() + step.decode.len(),
            "outcomes of step {}, one for each chunk and row",
            step.id
        );
        for ((request, end, samples), outcome) in chunks.chain(rows).zip(outcomes) {
            self.complete_row(request, end, samples, outcome);
        }
        self.cache.end_step(step.id);
        self.expire(now);
        self.take_events()
    }

    /// Returns the events since the last call, in their order. Those of time-outs and
    /// cancellations come between steps, too.
    #[must_use = "each event is returned once"]
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Returns when the next time-out ends, if no request ends before. The request fails in the
    /// first call of [`schedule`](Self::schedule) or [`complete`](Self::complete) from then on.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// Returns the figures of the moment and the counts since the start.
    pub fn metrics(&self) -> Metrics {
        let pool = &self.cache.pool;
        Metrics {
            running: self.running.len(),
            waiting: self.queue.len(),
            used_pages: pool.len() - pool.free() - pool.idle(),
            cached_pages: pool.idle(),
            ..self.counts
        }
    }

    /// Takes the outcome of a row that computed the positions of a request up to `end`, and samples
    /// a token if `samples`.
    fn complete_row(&mut self, request: RequestId, end: usize, samples: bool, outcome: Outcome) {
        let (token, stop) = match outcome {
            Outcome::Computed => (None, false),
            Outcome::Token(token) => (Some(token), false),
            Outcome::Stop(token) => (Some(token), true),
            Outcome::Failed(reason) => {
                self.end(request, EventKind::Failed(FailReason::Executor(reason)));
                return;
            }
        };
        assert_eq!(
            token.is_some(),
            samples,
            "the outcome of a row of {request:?}"
        );
        let Some(sequence) = self.sequences.get_mut(&request) else {
            return; // It ended while the step was in flight.
        };
        sequence.computed = end;
        if end <= sequence.prefill {
            self.cache.store(sequence);
        }
        if let Some(token) = token {
            let first = sequence.tokens.len() == sequence.prompt;
            sequence.tokens.push(token);
            let full = sequence.tokens.len() == sequence.max_len;
            self.queue.charge(sequence.key, 0, 1);
            self.counts.generated_tokens += 1;
            let kind = if first {
                EventKind::FirstToken
            } else {
                EventKind::Token
            };
            self.events.push(Event {
                request,
                kind: kind(token),
            });
            if stop {
                self.end(request, EventKind::Finished(FinishReason::Stop));
                return;
            } else if full {
                self.end(request, EventKind::Finished(FinishReason::Length));
                return;
            }
        }
        if sequence.preempting {
            self.preempt(request);
        }
    }

    /// Ends the requests whose time-outs have ended.
    fn expire(&mut self, now: Duration) {
        while let Some(&(deadline, request)) = self.deadlines.first()
            && deadline <= now
            && let Some(reason) = self.sequences[&request].timed_out(now)
        {
            self.end(request, EventKind::Failed(reason));
        }
    }

    /// Ends a request, with its last event. Returns false if it has ended already.
    fn end(&mut self, request: RequestId, kind: EventKind) -> bool {
        let Some(mut sequence) = self.sequences.remove(&request) else {
            return false;
        };
        self.cache.close(&mut sequence);
        self.running.remove(&sequence.rank);
        self.queue.end(&sequence);
        if let Some(deadline) = sequence.deadline() {
            self.deadlines.remove(&(deadline, request));
        }
        self.events.push(Event { request, kind });
        true
    }
}
