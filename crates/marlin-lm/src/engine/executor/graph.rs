//! Passes and their recorded graphs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{Graph, Int, Tensor};
use marlin_nn::{self as decode, LogprobsRead, RowsRead, SequenceState};

use crate::model::PassBatch;
use crate::{KvCache, Model};

/// The work that a graph records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pass {
    /// A decode step.
    Step {
        rows: usize,
        /// True if log probabilities of the chosen tokens are computed.
        logprobs: bool,
    },
    /// Tokens of prompts, some of which end in the pass.
    Prompts {
        rows: usize,
        last_rows: usize,
        /// True if log probabilities of the chosen tokens are computed.
        logprobs: bool,
    },
}

impl Pass {
    /// Creates the batch of the pass, with idle rows.
    pub(super) fn batch(self, model: &Model, slots: usize) -> PassBatch {
        let (heads, device) = (model.config().num_attention_heads, model.device());
        let (batch, logprobs) = match self {
            Self::Step { rows, logprobs } => (PassBatch::step(rows, heads, &device), logprobs),
            Self::Prompts {
                rows,
                last_rows,
                logprobs,
            } => {
                let batch = PassBatch::prompts(rows, last_rows, slots, &device);
                (batch, logprobs)
            }
        };
        if logprobs {
            batch.with_logprobs()
        } else {
            batch
        }
    }
}

/// The tensors that all steps read and write.
pub(super) struct State {
    pub(super) cache: KvCache,
    /// The [`TokenTable`](decode::TokenTable) of the slots.
    pub(super) token_table: Tensor<2, Int>,
}

/// The operations of a pass.
pub(super) enum Operations {
    /// A recorded graph, or the operations on a device that records none.
    Graph(Graph<(), Box<dyn FnMut() + Send>>),
    /// The operations of a model that reads from the device in a pass, which cannot be recorded.
    Unrecorded(Box<dyn FnMut() + Send>),
}

impl Operations {
    /// Returns true if the device has the operations as a graph.
    pub(super) fn is_hardware(&self) -> bool {
        matches!(self, Self::Graph(graph) if graph.is_hardware())
    }
}

/// A pass and its operations.
pub(super) struct PassGraph {
    pub(super) batch: Arc<Mutex<PassBatch>>,
    pub(super) operations: Operations,
    /// The rows of a step on the device; empty if the host does not know them.
    pub(super) rows: Vec<SequenceState>,
}

impl PassGraph {
    /// Starts a step on the rows on the device.
    pub(super) fn step(&mut self, pass: Pass) -> ModelStep {
        self.replay();
        let batch = lock(&self.batch);
        ModelStep::new(pass, &batch, &batch.rows)
    }

    /// Starts the pass on the rows on the device.
    pub(super) fn replay(&mut self) {
        match &mut self.operations {
            Operations::Graph(graph) => {
                // SAFETY: the graph reads and writes the model, the state and the batch. The
                // graph's closure holds a share of each, and all three keep their memory: nothing
                // else can change a shared model, and every operation on state and batch writes in
                // place. Only this executor has state and batch, and a replay takes `&mut`. The
                // functions of the executor are called on the stream on which the graph was
                // recorded.
                unsafe { graph.replay() };
            }
            Operations::Unrecorded(run) => run(),
        }
    }
}

/// A pass that was given to the device, which chooses the next tokens of its rows.
pub(super) struct ModelStep {
    pub(super) pass: Pass,
    pub(super) rows: RowsRead,
    pub(super) logprobs: Option<LogprobsRead>,
}

impl ModelStep {
    /// Starts copying the results of a pass to the host. `rows` are the rows that choose tokens.
    pub(super) fn new(pass: Pass, batch: &PassBatch, rows: &Tensor<2, Int>) -> Self {
        Self {
            pass,
            rows: decode::start_reading(rows),
            logprobs: batch.logprobs.as_ref().map(decode::start_reading_logprobs),
        }
    }
}

/// Locks a mutex, also after a panic: a panic between two operations leaves no tensor half written.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
