//! The clients: what they asked for, and what they got.

use crate::device::Device;
use marlin_serve::{Event, EventKind, FailReason, FinishReason, Metrics, Request, RequestId, Step};
use rand::RngExt;
use rand::rngs::StdRng;
use std::collections::BTreeMap;
use std::time::Duration;

/// Figures of a run.
#[derive(Debug, Default)]
pub struct Counts {
    pub refused: usize,
    accepted: usize,
    stopped: usize,
    complete: usize,
    cancelled: usize,
    queue_timeouts: usize,
    timeouts: usize,
    failed: usize,
    steps: usize,
    /// Decode rows whose token the host did not know.
    rows_ahead: usize,
    prefill_tokens: u64,
    generated_tokens: u64,
    prefix_hit_tokens: u64,
    preemptions: u64,
    /// The most steps that a request waited, as a fraction of its bound.
    longest_wait: f64,
}

impl Counts {
    fn ended(&self) -> usize {
        self.stopped
            + self.complete
            + self.cancelled
            + self.queue_timeouts
            + self.timeouts
            + self.failed
    }

    /// Takes the figures of a scheduler in which all requests have ended.
    pub fn finish(&mut self, metrics: &Metrics) {
        assert_eq!(self.ended(), self.accepted);
        assert_eq!(self.preemptions, metrics.preemptions);
        assert_eq!(self.generated_tokens, metrics.generated_tokens);
        self.prefill_tokens = metrics.prefill_tokens;
        self.prefix_hit_tokens = metrics.prefix_hit_tokens;
    }

    pub fn add(&mut self, other: &Self) {
        self.refused += other.refused;
        self.accepted += other.accepted;
        self.stopped += other.stopped;
        self.complete += other.complete;
        self.cancelled += other.cancelled;
        self.queue_timeouts += other.queue_timeouts;
        self.timeouts += other.timeouts;
        self.failed += other.failed;
        self.steps += other.steps;
        self.rows_ahead += other.rows_ahead;
        self.prefill_tokens += other.prefill_tokens;
        self.generated_tokens += other.generated_tokens;
        self.prefix_hit_tokens += other.prefix_hit_tokens;
        self.preemptions += other.preemptions;
        self.longest_wait = self.longest_wait.max(other.longest_wait);
    }

    /// Checks that the run had something of everything.
    pub fn check_coverage(&self) {
        for (name, count) in [
            ("refused", self.refused),
            ("stopped", self.stopped),
            ("complete", self.complete),
            ("cancelled", self.cancelled),
            ("queue_timeouts", self.queue_timeouts),
            ("timeouts", self.timeouts),
            ("failed", self.failed),
            ("rows_ahead", self.rows_ahead),
            ("prefix_hit_tokens", self.prefix_hit_tokens as usize),
            ("preemptions", self.preemptions as usize),
        ] {
            assert!(count >= 100, "only {count} {name}");
        }
    }
}

/// A request that has not ended.
struct Live {
    request: Request,
    submitted: Duration,
    generated: usize,
    /// True once a step had a row of it.
    started: bool,
    cancelled: bool,
    /// The number of the last step in which it can start.
    latest_start: usize,
    submitted_step: usize,
}

impl Live {
    fn work(&self) -> usize {
        self.request.prompt.len() + self.request.max_tokens
    }

    fn ends(&self, timeout: Option<Duration>) -> Option<Duration> {
        timeout.map(|timeout| self.submitted + timeout)
    }
}

pub struct Client {
    live: BTreeMap<RequestId, Live>,
    pub counts: Counts,
    /// True if requests have one priority and start in the order of arrival: waits are bounded.
    bounded: bool,
    in_order: bool,
}

impl Client {
    pub fn new(bounded: bool, in_order: bool) -> Self {
        Self {
            live: BTreeMap::new(),
            counts: Counts::default(),
            bounded,
            in_order,
        }
    }

    pub fn live(&self) -> usize {
        self.live.len()
    }

    pub fn add(&mut self, id: RequestId, request: Request, now: Duration) {
        // The first of the running sequences is never pre-empted. It gets on by a token in each
        // step, but for the steps in which it waits for a page, at most two for each page. It may
        // have been pre-empted before it was the first, and then computes its tokens anew. All that
        // came before are the first at some time.
        let ahead: usize = self.live.values().map(|live| 4 * live.work() + 2).sum();
        let live = Live {
            request,
            submitted: now,
            generated: 0,
            started: false,
            cancelled: false,
            latest_start: self.counts.steps + ahead + 2,
            submitted_step: self.counts.steps,
        };
        assert!(self.live.insert(id, live).is_none());
        self.counts.accepted += 1;
    }

    /// Picks a request to cancel.
    pub fn cancel(&mut self, rng: &mut StdRng) -> Option<RequestId> {
        let live = self.live.iter_mut().filter(|(_, live)| !live.cancelled);
        let mut live: Vec<_> = live.collect();
        if live.is_empty() {
            return None;
        }
        let (id, live) = live.swap_remove(rng.random_range(0..live.len()));
        live.cancelled = true;
        Some(*id)
    }

    /// Checks the rows of a new step.
    pub fn scheduled(&mut self, step: &Step) {
        for row in &step.decode {
            let live = &self.live[&row.request];
            assert!(live.started && !live.cancelled);
            assert!(row.position + 1 < live.work(), "a token too many");
            self.counts.rows_ahead += usize::from(row.token.is_none());
        }
        for chunk in &step.prefill {
            assert!(!chunk.tokens.is_empty());
            let live = self.live.get_mut(&chunk.request).unwrap();
            assert!(!live.cancelled);
            if std::mem::replace(&mut live.started, true) {
                continue;
            }
            let (priority, latest) = (live.request.priority, live.latest_start);
            if self.bounded {
                assert!(self.counts.steps <= latest, "{:?} starved", chunk.request);
                let waited = (self.counts.steps - live.submitted_step) as f64;
                let bound = (latest - live.submitted_step) as f64;
                self.counts.longest_wait = self.counts.longest_wait.max(waited / bound);
            }
            for (other, live) in self.live.iter().filter(|(_, live)| !live.started) {
                let ahead = live.request.priority > priority
                    || (self.in_order
                        && live.request.priority == priority
                        && *other < chunk.request);
                assert!(!ahead, "{:?} overtook {other:?}", chunk.request);
            }
        }
    }

    pub fn events(&mut self, events: Vec<Event>, device: &Device, now: Duration) {
        for Event { request, kind } in events {
            let live = self.live.get_mut(&request).expect("an event after the end");
            let position = live.request.prompt.len() + live.generated;
            match kind {
                EventKind::FirstToken(token) | EventKind::Token(token) => {
                    let is_first = matches!(kind, EventKind::FirstToken(_));
                    assert_eq!(is_first, live.generated == 0);
                    assert!(live.started && live.generated < live.request.max_tokens);
                    assert_eq!(token, device.token(request, position));
                    live.generated += 1;
                    self.counts.generated_tokens += 1;
                    continue;
                }
                EventKind::Preempted => {
                    assert!(live.started);
                    self.counts.preemptions += 1;
                    continue;
                }
                EventKind::Finished(FinishReason::Stop) => {
                    assert!(device.is_stop(request, position - 1));
                    self.counts.stopped += 1;
                }
                EventKind::Finished(FinishReason::Length) => {
                    assert_eq!(live.generated, live.request.max_tokens);
                    assert!(!device.is_stop(request, position - 1));
                    self.counts.complete += 1;
                }
                EventKind::Finished(FinishReason::Cancelled) => {
                    assert!(live.cancelled);
                    self.counts.cancelled += 1;
                }
                EventKind::Failed(FailReason::QueueTimeout(timeout)) => {
                    assert_eq!(Some(timeout), live.request.queue_timeout);
                    assert!(!live.started && live.submitted + timeout <= now);
                    self.counts.queue_timeouts += 1;
                }
                EventKind::Failed(FailReason::Timeout(timeout)) => {
                    assert_eq!(Some(timeout), live.request.timeout);
                    assert!(live.submitted + timeout <= now);
                    self.counts.timeouts += 1;
                }
                EventKind::Failed(FailReason::Executor(_)) => self.counts.failed += 1,
                kind => panic!("{kind:?}"),
            }
            self.live.remove(&request);
        }
    }

    /// Checks the requests that are left after a step.
    pub fn completed(&mut self, now: Duration) {
        self.counts.steps += 1;
        for (id, live) in &self.live {
            assert!(!live.cancelled, "{id:?} goes on after it was cancelled");
            let queue = live
                .ends(live.request.queue_timeout)
                .filter(|_| !live.started);
            let ends = [queue, live.ends(live.request.timeout)];
            assert!(
                ends.iter().flatten().all(|&end| end > now),
                "{id:?} is late"
            );
            if self.bounded && !live.started {
                assert!(self.counts.steps <= live.latest_start, "{id:?} starves");
            }
        }
    }
}
