//! The rows of the next step.

use super::Scheduler;
use super::request::{Event, EventKind, RequestId};
use super::step::{DecodeRow, PrefillChunk, Step};
use crate::pages::PageId;
use std::sync::Arc;
use std::time::Duration;

/// The most steps that are not complete: one runs on the device, the next one is ready.
const MAX_STEPS: usize = 2;

impl Scheduler {
    /// Returns the next step, or `None` if there is nothing to compute at present: no request can
    /// run before the step in flight is complete, or two steps are in flight already.
    ///
    /// The step may be started at once. It is given to [`complete`](Self::complete) after the one
    /// that is in flight.
    pub fn schedule(&mut self, now: Duration) -> Option<Step> {
        self.expire(now);
        if self.cache.steps() == MAX_STEPS {
            return None;
        }
        let decode = self.decode_rows();
        let prefill = self.prefill_chunks(self.config.max_step_tokens - decode.len());
        if decode.is_empty() && prefill.is_empty() {
            return None;
        }
        let id = self.next_step;
        self.next_step += 1;
        self.cache.begin_step(id);
        Some(Step {
            id,
            prefill,
            decode,
        })
    }

    /// Returns a row for each sequence that decodes and has a page for it.
    fn decode_rows(&mut self) -> Vec<DecodeRow> {
        let mut rows = Vec::new();
        // Pages that become available with the step in flight.
        let running = self.running.iter();
        let mut expected: usize = running
            .map(|rank| &self.sequences[&rank.request])
            .filter(|sequence| sequence.preempting)
            .map(|sequence| self.cache.gain(sequence))
            .sum();
        // By rank, so that victims of pre-emption, taken from the end, have no row yet.
        let ranks: Vec<_> = self.running.iter().map(|rank| rank.request).collect();
        for request in ranks {
            let sequence = &self.sequences[&request];
            if !sequence.decodes() {
                continue;
            }
            let position = sequence.scheduled;
            let mut page = None;
            if position == sequence.pages.len() * self.config.page_size {
                page = self.page_for(request, &mut expected);
                if page.is_none() {
                    continue;
                }
            }
            let Some(sequence) = self.sequences.get_mut(&request) else {
                continue;
            };
            if let Some(page) = page {
                Arc::make_mut(&mut sequence.pages).push(page);
            }
            sequence.scheduled += 1;
            sequence.last_step = Some(self.next_step);
            rows.push(DecodeRow {
                request,
                token: sequence.tokens.get(position).copied(),
                position,
                pages: sequence.pages.clone(),
            });
        }
        rows
    }

    /// Returns a page for a running sequence, and pre-empts others where there is none. Returns
    /// `None` if the sequence has to wait for `expected` pages of those that are being pre-empted,
    /// or was itself the one to pre-empt.
    fn page_for(&mut self, request: RequestId, expected: &mut usize) -> Option<PageId> {
        loop {
            if let Some(page) = self.cache.take() {
                return Some(page);
            }
            if *expected > 0 {
                *expected -= 1;
                return None;
            }
            let mut newest = self.running.iter().rev().map(|rank| rank.request);
            let victim = newest.find(|request| !self.sequences[request].preempting)?;
            let sequence = self.sequences.get_mut(&victim)?;
            if self.cache.in_flight(sequence) {
                sequence.preempting = true;
                *expected += self.cache.gain(sequence);
            } else {
                self.preempt(victim);
            }
            if victim == request {
                return None;
            }
        }
    }

    /// Moves a running sequence to the queue, whose last step is complete or about to be.
    pub(super) fn preempt(&mut self, request: RequestId) {
        let Some(sequence) = self.sequences.get_mut(&request) else {
            return;
        };
        self.cache.close(sequence);
        sequence.computed = 0;
        sequence.scheduled = 0;
        sequence.prefill = sequence.tokens.len();
        sequence.preempting = false;
        self.running.remove(&sequence.rank);
        self.queue.push_preempted(sequence);
        self.counts.preemptions += 1;
        let kind = EventKind::Preempted;
        self.events.push(Event { request, kind });
    }

    /// Returns chunks of up to `budget` tokens together: of running sequences, then of requests
    /// from the queue.
    fn prefill_chunks(&mut self, mut budget: usize) -> Vec<PrefillChunk> {
        let mut chunks = Vec::new();
        let ranks: Vec<_> = self.running.iter().map(|rank| rank.request).collect();
        for request in ranks {
            if budget > 0 {
                chunks.extend(self.prefill_chunk(request, &mut budget));
            }
        }
        while budget > 0
            && self.running.len() < self.config.max_sequences
            && let Some(request) = self.admit()
        {
            chunks.extend(self.prefill_chunk(request, &mut budget));
        }
        chunks
    }

    /// Returns the next chunk of a sequence, if a part of its prompt is left.
    fn prefill_chunk(&mut self, request: RequestId, budget: &mut usize) -> Option<PrefillChunk> {
        let sequence = self.sequences.get_mut(&request)?;
        if !sequence.prefills() {
            return None;
        }
        let start = sequence.scheduled;
        let end = sequence.prefill.min(start + *budget);
        *budget -= end - start;
        sequence.scheduled = end;
        sequence.last_step = Some(self.next_step);
        self.counts.prefill_tokens += (end - start) as u64;
        Some(PrefillChunk {
            request,
            tokens: sequence.tokens[start..end].to_vec(),
            start,
            pages: sequence.pages.clone(),
            ends_prompt: end == sequence.prefill,
        })
    }

    /// Moves the next request of the queue to the running sequences, if there are pages for its
    /// prompt, and one more for each running sequence: it would be the first to be pre-empted.
    fn admit(&mut self) -> Option<RequestId> {
        let request = self.queue.next()?;
        let sequence = self.sequences.get_mut(&request)?;
        if !self.cache.admit(sequence, self.running.len()) {
            return None;
        }
        if self.queue.remove(sequence) {
            let missing = sequence.prefill - sequence.computed;
            self.queue.charge(sequence.key, missing, 0);
            let waiting = sequence.deadline();
            sequence.queue_timeout = None;
            if let Some(deadline) = waiting {
                self.deadlines.remove(&(deadline, request));
            }
            let running = sequence.deadline();
            self.deadlines
                .extend(running.map(|deadline| (deadline, request)));
        }
        self.running.insert(sequence.rank);
        self.counts.prefix_hit_tokens += sequence.computed as u64;
        Some(request)
    }
}
