//! The service that each key was given.

use std::collections::HashMap;

/// What a token of a prompt and a generated token count, as in the paper: a generated token takes a
/// row of a step of its own.
const PREFILL_WEIGHT: u64 = 1;
const GENERATED_WEIGHT: u64 = 2;

/// Virtual token counters: the tokens that were computed for each key.
#[derive(Debug, Default)]
pub(super) struct TokenCounters {
    keys: HashMap<u64, Counter>,
}

#[derive(Debug, Default)]
struct Counter {
    served: u64,
    /// The requests that are waiting or running.
    requests: usize,
}

impl TokenCounters {
    /// Counts a new request of a key. A key that had none is lifted to the least of the others, so
    /// that time without requests earns nothing.
    pub fn join(&mut self, key: u64) {
        let least = self.least();
        let counter = self.keys.entry(key).or_default();
        if counter.requests == 0 {
            counter.served = counter.served.max(least);
        }
        counter.requests += 1;
    }

    /// Counts a request of a key that ended. Keys without requests are forgotten once their counter
    /// would be lifted anyway, so that their number stays bounded by the service given.
    pub fn leave(&mut self, key: u64) {
        let Some(counter) = self.keys.get_mut(&key) else {
            return;
        };
        counter.requests -= 1;
        if counter.requests > 0 {
            return;
        }
        if self.keys.values().all(|counter| counter.requests == 0) {
            self.keys.clear();
        } else {
            let least = self.least();
            self.keys
                .retain(|_, counter| counter.requests > 0 || counter.served > least);
        }
    }

    /// Counts tokens for a key that has requests.
    pub fn charge(&mut self, key: u64, prefill: usize, generated: usize) {
        if let Some(counter) = self.keys.get_mut(&key) {
            counter.served += PREFILL_WEIGHT * prefill as u64 + GENERATED_WEIGHT * generated as u64;
        }
    }

    /// Returns the counter of a key.
    pub fn get(&self, key: u64) -> u64 {
        self.keys.get(&key).map_or(0, |counter| counter.served)
    }

    /// Returns the least counter of the keys with requests; 0 if there are none.
    fn least(&self) -> u64 {
        let active = self.keys.values().filter(|counter| counter.requests > 0);
        active.map(|counter| counter.served).min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_earns_nothing_while_it_has_no_requests_and_keeps_what_it_owes() {
        let mut counters = TokenCounters::default();
        counters.join(1);
        counters.charge(1, 10, 5);
        counters.join(2);
        assert_eq!((counters.get(1), counters.get(2)), (20, 20));
        counters.charge(2, 7, 0);
        counters.leave(2);
        counters.join(2);
        assert_eq!(counters.get(2), 27);
        // At 20, key 1 would be lifted to 27 anyway, and is forgotten.
        counters.leave(1);
        assert_eq!(counters.keys.len(), 1);
        counters.join(1);
        assert_eq!(counters.get(1), 27);
        counters.leave(1);
        counters.leave(2);
        assert!(counters.keys.is_empty());
    }
}
