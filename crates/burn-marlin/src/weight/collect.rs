//! Finding quantised weights in a model, and putting others in their place. A traversal sees the
//! tensors of a weight, never the weight itself, which is passed through a thread-local.

use super::QuantizedWeight;
use std::cell::RefCell;

thread_local! {
    /// True while tensors are being collected, and the weight whose tensors are visited next.
    static OFFERED: RefCell<(bool, Option<QuantizedWeight>)> = const { RefCell::new((false, None)) };

    /// What takes the place of the weight whose first tensor is being mapped.
    static REPLACEMENT: RefCell<Option<QuantizedWeight>> = const { RefCell::new(None) };
}

impl QuantizedWeight {
    /// Runs a traversal in which [`take_offered`](Self::take_offered) returns the weights.
    pub(crate) fn collecting<R>(traversal: impl FnOnce() -> R) -> R {
        /// Collecting ends with a panic, too.
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

    /// The weight whose first tensor is being visited; `None` for its others, and everything that
    /// is none of a weight's.
    pub(crate) fn take_offered() -> Option<Self> {
        OFFERED.with_borrow_mut(|(_, weight)| weight.take())
    }

    /// Puts this weight's values in the place of those of the weight whose first tensor a mapper is
    /// given: none of its other tensors is mapped.
    pub(crate) fn replace_mapped(self) {
        REPLACEMENT.set(Some(self));
    }

    /// The weight that the mapper of the first tensor has put in this one's place.
    pub(super) fn take_replacement() -> Option<Self> {
        REPLACEMENT.take()
    }

    /// Before its tensors are visited.
    pub(super) fn offer(&self) {
        OFFERED.with_borrow_mut(|(collecting, weight)| {
            if *collecting {
                *weight = Some(self.clone());
            }
        });
    }
}
