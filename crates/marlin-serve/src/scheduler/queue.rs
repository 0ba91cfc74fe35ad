//! The waiting queue.

use super::fairness::TokenCounters;
use super::request::RequestId;
use super::sequence::{Rank, Sequence};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Requests that wait: by priority, of equal priority the pre-empted ones first, then by arrival or
/// by the counters of their keys.
#[derive(Debug)]
pub(super) struct Queue {
    /// New requests by priority and key. Without fairness, all are under key 0.
    new: BTreeMap<(Reverse<i32>, u64), BTreeSet<RequestId>>,
    preempted: BTreeSet<Rank>,
    /// The number of new requests.
    new_len: usize,
    /// The counters of the keys, with fairness.
    counters: Option<TokenCounters>,
}

impl Queue {
    pub fn new(fair: bool) -> Self {
        Self {
            new: BTreeMap::new(),
            preempted: BTreeSet::new(),
            new_len: 0,
            counters: fair.then(TokenCounters::default),
        }
    }

    /// Returns the number of new requests.
    pub fn new_len(&self) -> usize {
        self.new_len
    }

    /// Returns the number of new and pre-empted requests.
    pub fn len(&self) -> usize {
        self.new_len + self.preempted.len()
    }

    /// Adds a new request, which counts for its key until [`end`](Self::end).
    pub fn push(&mut self, sequence: &Sequence) {
        if let Some(counters) = &mut self.counters {
            counters.join(sequence.key);
        }
        let lane = self.new.entry(self.lane(sequence)).or_default();
        lane.insert(sequence.rank.request);
        self.new_len += 1;
    }

    /// Adds a request that was pre-empted.
    pub fn push_preempted(&mut self, sequence: &Sequence) {
        self.preempted.insert(sequence.rank);
    }

    /// Returns the request that is next, which stays in the queue.
    pub fn next(&self) -> Option<RequestId> {
        let highest = self
            .new
            .first_key_value()
            .map(|(&(priority, _), _)| priority);
        if let Some(preempted) = self.preempted.first()
            && highest.is_none_or(|highest| preempted.priority <= highest)
        {
            return Some(preempted.request);
        }
        let lanes = self.new.range((highest?, 0)..=(highest?, u64::MAX));
        let served = |key| self.counters.as_ref().map(|counters| counters.get(key));
        lanes
            .filter_map(|(&(_, key), requests)| Some((served(key), *requests.first()?)))
            .min()
            .map(|(_, request)| request)
    }

    /// Removes a request, if it is in the queue. Returns true if it was new.
    pub fn remove(&mut self, sequence: &Sequence) -> bool {
        if self.preempted.remove(&sequence.rank) {
            return false;
        }
        let lane = self.lane(sequence);
        if let Some(requests) = self.new.get_mut(&lane)
            && requests.remove(&sequence.rank.request)
        {
            self.new_len -= 1;
            if requests.is_empty() {
                self.new.remove(&lane);
            }
            return true;
        }
        false
    }

    /// Removes a request that ended, waiting or not.
    pub fn end(&mut self, sequence: &Sequence) {
        self.remove(sequence);
        if let Some(counters) = &mut self.counters {
            counters.leave(sequence.key);
        }
    }

    /// Counts `prefill` tokens of a prompt and `generated` tokens for a key.
    pub fn charge(&mut self, key: u64, prefill: usize, generated: usize) {
        if let Some(counters) = &mut self.counters {
            counters.charge(key, prefill, generated);
        }
    }

    fn lane(&self, sequence: &Sequence) -> (Reverse<i32>, u64) {
        let key = if self.counters.is_some() {
            sequence.key
        } else {
            0
        };
        (sequence.rank.priority, key)
    }

    /// Returns the ranks of all requests in the queue.
    pub fn ranks(&self) -> BTreeSet<Rank> {
        let new = self.new.iter().flat_map(|(&(priority, _), requests)| {
            requests
                .iter()
                .map(move |&request| Rank { priority, request })
        });
        new.chain(self.preempted.iter().copied()).collect()
    }
}
