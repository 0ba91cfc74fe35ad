//! The search for quantised weights in a model, and their replacement. A traversal sees the tensors
//! of a weight, not the weight itself, so the weight is passed through a thread-local.

use super::QuantizedWeight;
use std::cell::RefCell;

thread_local! {
    /// True while tensors are being collected, and the weight whose tensors are visited next.
    static OFFERED: RefCell<(bool, Option<QuantizedWeight>)> = const { RefCell::new((false, None)) };

    /// The replacement for the weight whose first tensor is being mapped.
    static REPLACEMENT: RefCell<Option<QuantizedWeight>> = const { RefCell::new(None) };
}

impl QuantizedWeight {
    /// Runs a traversal in which [`take_offered`](Self::take_offered) returns the weights.
    pub(crate) fn collecting<R>(traversal: impl FnOnce() -> R) -> R {
        /// A guard that ends the collection, also on a panic.
        struct Reset;
        impl Drop for Reset {
            fn drop(&mut self) {
                OFFERED.set((false, None));
            }
        }
        OFFERED.set((true, None));
        let _reset = Reset;
        traversal()
    }

    /// Returns the weight whose first tensor is being visited; `None` for its other tensors, and
    /// for parameters that do not belong to a weight.
    pub(crate) fn take_offered() -> Option<Self> {
        OFFERED.with_borrow_mut(|(_, weight)| weight.take())
    }

    /// Replaces the values of the weight whose first tensor is being mapped with this weight's
    /// values. The other tensors of the replaced weight are not mapped.
    pub(crate) fn replace_mapped(self) {
        REPLACEMENT.set(Some(self));
    }

    /// Returns the replacement that a mapper has set for this weight at its first tensor.
    pub(super) fn take_replacement() -> Option<Self> {
        REPLACEMENT.take()
    }

    /// Offers this weight to a collecting traversal, before its tensors are visited.
    pub(super) fn offer(&self) {
        OFFERED.with_borrow_mut(|(collecting, weight)| {
            if *collecting {
                *weight = Some(self.clone());
            }
        });
    }
}
