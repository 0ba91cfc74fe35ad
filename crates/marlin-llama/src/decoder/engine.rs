//! A model on a device: prompts to its cache, and steps as recorded graphs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use burn::tensor::{Graph, Int, Tensor, capture};
use marlin_decode::{self as decode, Row, RowsRead};

use super::PREFILL_CHUNK;
use super::scheduler::Engine;
use crate::model::{Batch, CachePosition};
use crate::tokens::token_tensor;
use crate::{KvCache, LlamaError, LlamaModel};

/// Held for writing while a step is recorded, and for reading by all other work of decoders: CUDA would take work of other threads into the recording
/// if it shares the stream, and fail the recording if it allocates, on whatever stream and device.
static RECORDING: RwLock<()> = RwLock::new(());

/// All functions must be called on the stream of the model.
pub(super) struct ModelEngine {
    model: Arc<LlamaModel>,
    state: Arc<Mutex<State>>,
    /// By number of rows.
    graphs: BTreeMap<usize, StepGraph>,
}

/// The tensors that all steps read and write.
struct State {
    cache: KvCache,
    /// [slots, vocab / 32 up].
    seen: Tensor<2, Int>,
}

/// A step for a number of rows.
struct StepGraph {
    batch: Arc<Mutex<Batch>>,
    graph: Graph<(), Box<dyn FnMut() + Send>>,
    /// The rows that the device holds; none if the host does not know them.
    rows: Vec<Row>,
}

/// A step that was given to the device.
pub(super) struct ModelStep {
    /// Rows of its graph.
    size: usize,
    rows: RowsRead,
}

impl ModelEngine {
    /// # Errors
    /// [`LlamaError::CacheTooLarge`].
    pub(super) fn new(model: Arc<LlamaModel>, slots: usize) -> Result<Self, LlamaError> {
        let (config, device, dtype) = (model.config(), model.device(), model.dtype());
        let needed = KvCache::size_bytes(config, slots, model.max_len(), dtype);
        if let Some(free) = burn_marlin::device::free_memory(&device).filter(|&free| free < needed) {
            return Err(LlamaError::CacheTooLarge { slots, positions: model.max_len(), needed, free });
        }
        let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        let cache = KvCache::new(config, slots, model.max_len(), dtype, &device);
        let seen = decode::words([slots, config.vocab_size.div_ceil(32)], &device);
        Ok(Self { model, state: Arc::new(Mutex::new(State { cache, seen })), graphs: BTreeMap::new() })
    }

    /// As [`Decoder::warm_up`](super::Decoder::warm_up).
    pub(super) fn warm_up(&mut self, prompt_tokens: usize) -> Duration {
        if !decode::has_kernels(&self.model.device()) {
            return Duration::ZERO;
        }
        let start = Instant::now();
        let tokens = vec![0; prompt_tokens.clamp(1, self.model.max_len()) - 1];
        for (chunk, tokens) in tokens.chunks(PREFILL_CHUNK).enumerate() {
            self.prefill(tokens, CachePosition { slot: 0, start: chunk * PREFILL_CHUNK });
        }
        self.record(1);
        start.elapsed()
    }

    pub(super) fn is_captured(&self) -> bool {
        self.graphs.values().any(|graph| graph.graph.is_hardware())
    }

    /// The step for a number of rows, recorded the first time.
    fn record(&mut self, size: usize) -> &mut StepGraph {
        let (model, state) = (&self.model, &self.state);
        self.graphs.entry(size).or_insert_with(|| {
            let _recording = RECORDING.write().unwrap_or_else(PoisonError::into_inner);
            let device = model.device();
            // Idle rows change nothing while the step is warmed up and recorded.
            let batch = Arc::new(Mutex::new(Batch::idle(size, model.config().num_attention_heads, &device)));
            let (model, state, of_step) = (model.clone(), state.clone(), batch.clone());
            let step: Box<dyn FnMut() + Send> = Box::new(move || {
                let State { cache, seen } = &mut *lock(&state);
                model.step(&mut lock(&of_step), cache, seen);
            });
            let graph = capture(&device, step);
            match graph.is_hardware() {
                true => tracing::debug!(rows = size, "recorded a step"),
                false => tracing::info!(rows = size, "this device records no graphs: steps run operation by operation"),
            }
            StepGraph { batch, graph, rows: vec![Row::IDLE; size] }
        })
    }
}

impl StepGraph {
    /// Starts a step of the rows that the device has.
    fn replay(&mut self) -> RowsRead {
        // SAFETY: what the graph reads and writes are the model, the state and the batch. The graph's closure owns them or a share of them, and they keep
        // their memory: nothing else can change a shared model, and every operation on state and batch writes in place. Only this engine has state and
        // batch, which takes `&mut` to replay, and its functions are called on the stream that the graph was recorded on.
        unsafe { self.graph.replay() };
        decode::start_reading(&lock(&self.batch).rows)
    }
}

impl Engine for ModelEngine {
    type Step = ModelStep;

    fn prefill(&mut self, tokens: &[u32], position: CachePosition) {
        let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        let tokens = token_tensor(tokens, [1, tokens.len()], &self.model.device());
        self.model.prefill(tokens, &mut lock(&self.state).cache, position);
    }

    fn set_seen(&mut self, slot: usize, tokens: &[u32]) {
        let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        let bitmap = decode::bitmap(tokens, self.model.config().vocab_size);
        decode::write_words(&mut lock(&self.state).seen, slot, bitmap.into_iter().map(|word| word as i32).collect());
    }

    fn start(&mut self, rows: &[Row]) -> ModelStep {
        let size = rows.len().next_power_of_two();
        let mut rows = rows.to_vec();
        rows.resize(size, Row::IDLE);
        let graph = self.record(size);
        let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        if graph.rows != rows {
            decode::write_rows(&mut lock(&graph.batch).rows, 0, &rows);
        }
        ModelStep { size, rows: graph.replay() }
    }

    fn start_next(&mut self, count: usize) -> Option<ModelStep> {
        let size = count.next_power_of_two();
        let graph = self.graphs.get_mut(&size).filter(|graph| graph.graph.is_hardware())?;
        let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        Some(ModelStep { size, rows: graph.replay() })
    }

    fn finish(&mut self, step: ModelStep) -> Result<Vec<Row>, LlamaError> {
        let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        let rows = step.rows.wait();
        if let Some(graph) = self.graphs.get_mut(&step.size) {
            graph.rows = rows.as_ref().map_or_else(|_| Vec::new(), Clone::clone);
        }
        Ok(rows?)
    }
}

/// A panic between two operations leaves tensors, which are never half written.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
