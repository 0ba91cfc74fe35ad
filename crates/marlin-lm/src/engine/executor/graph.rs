//! Passes and their recorded graphs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{Graph, Int, Tensor};
use marlin_nn::{self as decode, RowsRead, SequenceState};

use crate::model::PassBatch;
use crate::{KvCache, Model};

/// The work that a graph records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pass {
    /// A decode step.
    Step { rows: usize },
    /// Tokens of prompts, some of which end in the pass.
    Prompts { rows: usize, last_rows: usize },
}

impl Pass {
    /// Creates the batch of the pass, with idle rows.
    pub(super) fn batch(self, model: &Model, slots: usize) -> PassBatch {
        match self {
            Self::Step { rows } => {
                PassBatch::step(rows, model.config().num_attention_heads, &model.device())
            }
            Self::Prompts { rows, last_rows } => {
                PassBatch::prompts(rows, last_rows, slots, &model.device())
            }
        }
    }
}

/// The tensors that all steps read and write.
pub(super) struct State {
    pub(super) cache: KvCache,
    /// [[`BITMAPS`](decode::BITMAPS) * slots, vocab / 32, rounded up]: for each slot, the bitmap of its sequence's
    /// tokens and the bitmap of its suppressed tokens.
    pub(super) bitmaps: Tensor<2, Int>,
}

/// A recorded pass.
pub(super) struct PassGraph {
    pub(super) batch: Arc<Mutex<PassBatch>>,
    pub(super) graph: Graph<(), Box<dyn FnMut() + Send>>,
    /// The rows of a step on the device; empty if the host does not know them.
    pub(super) rows: Vec<SequenceState>,
}

impl PassGraph {
    /// Starts a step on the rows on the device.
    pub(super) fn step(&mut self) -> RowsRead {
        self.replay();
        decode::start_reading(&lock(&self.batch).rows)
    }

    /// Starts the pass on the rows on the device.
    pub(super) fn replay(&mut self) {
        // SAFETY: the graph reads and writes the model, the state and the batch. The graph's
        // closure holds a share of each, and all three keep their memory: nothing else can change a
        // shared model, and every operation on state and batch writes in place. Only this executor
        // has state and batch, and a replay takes `&mut`. The functions of the executor are called
        // on the stream on which the graph was recorded.
        unsafe { self.graph.replay() };
    }
}

/// Locks a mutex, also after a panic: a panic between two operations leaves no tensor half written.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
