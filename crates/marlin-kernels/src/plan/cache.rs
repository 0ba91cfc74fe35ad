//! Plans that were made before.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{LazyLock, Mutex, PoisonError};

/// The maximum number of cached plans. Without a limit, prompts of many different lengths would
/// make the cache grow forever.
pub(super) const MAX_PLANS: usize = 4096;

/// A cache of plans, for a static variable.
pub(crate) struct PlanCache<K, P>(LazyLock<Mutex<HashMap<K, P>>>);

impl<K: Eq + Hash, P: Copy> PlanCache<K, P> {
    /// Creates an empty cache.
    pub const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }

    /// Returns the plan for a key, made by `choose` the first time.
    pub fn get(&self, key: K, choose: impl FnOnce(&K) -> P) -> P {
        // A panic in another thread leaves the map valid: an entry is either inserted or not.
        let mut plans = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&key) {
            return *plan;
        }
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        let plan = choose(&key);
        plans.insert(key, plan);
        plan
    }

    /// Returns the number of plans.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}
