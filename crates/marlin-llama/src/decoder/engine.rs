//! A model on a device: prompts to its cache, and steps as recorded graphs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use burn::tensor::{Graph, Int, Tensor, capture};
use marlin_decode::{self as decode, Row, RowState, RowsRead};

use super::PREFILL_CHUNK;
use super::scheduler::{Engine, PromptChunk};
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
    /// By their work and number of rows.
    graphs: BTreeMap<(Pass, usize), RowsGraph>,
    /// True if prompts can be read as rows.
    takes_prompts: bool,
}

/// The last position of a prompt that is read as rows of one graph. Each row reads the keys and values before it by itself, so past it matrices are
/// faster: of Llama 2 7B on an H200, 64 tokens take 7 ms as rows and 32 as matrices, 1024 tokens 94 as rows and 76 as matrices.
const LAST_ROW_POSITION: usize = 511;

/// The work of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pass {
    /// A decode step.
    Step,
    /// Tokens of prompts.
    Prompt,
}

/// The tensors that all steps read and write.
struct State {
    cache: KvCache,
    /// [slots, vocab / 32 up].
    seen: Tensor<2, Int>,
}

/// A step, or a pass over tokens of prompts, for a number of rows.
struct RowsGraph {
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
        let takes_prompts = decode::takes_prompts(&device, dtype);
        Ok(Self { model, state: Arc::new(Mutex::new(State { cache, seen })), graphs: BTreeMap::new(), takes_prompts })
    }

    /// As [`Decoder::warm_up`](super::Decoder::warm_up).
    pub(super) fn warm_up(&mut self, prompt_tokens: usize) -> Duration {
        if !decode::has_kernels(&self.model.device()) {
            return Duration::ZERO;
        }
        let start = Instant::now();
        let tokens = vec![0; prompt_tokens.clamp(1, self.model.max_len()) - 1];
        for (chunk, tokens) in tokens.chunks(PREFILL_CHUNK).enumerate() {
            let position = CachePosition { slot: 0, start: chunk * PREFILL_CHUNK };
            self.prefill(&[PromptChunk { tokens: tokens.to_vec(), position }]);
        }
        self.record(Pass::Step, 1);
        start.elapsed()
    }

    pub(super) fn is_captured(&self) -> bool {
        self.graphs.iter().any(|((pass, _), graph)| *pass == Pass::Step && graph.graph.is_hardware())
    }

    /// The graph for a number of rows, recorded the first time.
    fn record(&mut self, pass: Pass, size: usize) -> &mut RowsGraph {
        let (model, state) = (&self.model, &self.state);
        self.graphs.entry((pass, size)).or_insert_with(|| {
            let _recording = RECORDING.write().unwrap_or_else(PoisonError::into_inner);
            let device = model.device();
            // Idle rows change nothing while the graph is warmed up and recorded.
            let is_prompt = pass == Pass::Prompt;
            let batch = Arc::new(Mutex::new(Batch::idle(size, model.config().num_attention_heads, is_prompt, &device)));
            let (model, state, of_step) = (model.clone(), state.clone(), batch.clone());
            let step: Box<dyn FnMut() + Send> = Box::new(move || {
                let State { cache, seen } = &mut *lock(&state);
                match pass {
                    Pass::Step => model.step(&mut lock(&of_step), cache, seen),
                    Pass::Prompt => model.prefill_rows(&lock(&of_step), cache),
                }
            });
            let graph = capture(&device, step);
            match graph.is_hardware() {
                true => tracing::debug!(rows = size, ?pass, "recorded a graph"),
                false => tracing::info!(rows = size, ?pass, "this device records no graphs: operations run one by one"),
            }
            RowsGraph { batch, graph, rows: vec![Row::IDLE; size] }
        })
    }
}

impl RowsGraph {
    /// Writes the rows where the device has others.
    fn set_rows(&self, rows: &[Row]) {
        if self.rows != rows {
            decode::write_rows(&mut lock(&self.batch).rows, 0, rows);
        }
    }

    /// Starts the graph on the rows that the device has.
    fn replay(&mut self) {
        // SAFETY: what the graph reads and writes are the model, the state and the batch. The graph's closure owns them or a share of them, and they keep
        // their memory: nothing else can change a shared model, and every operation on state and batch writes in place. Only this engine has state and
        // batch, which takes `&mut` to replay, and its functions are called on the stream that the graph was recorded on.
        unsafe { self.graph.replay() };
    }

    /// Starts a step of the rows that the device has.
    fn step(&mut self) -> RowsRead {
        self.replay();
        decode::start_reading(&lock(&self.batch).rows)
    }
}

impl Engine for ModelEngine {
    type Step = ModelStep;

    fn prefill(&mut self, chunks: &[PromptChunk]) {
        let as_rows = |chunk: &&PromptChunk| self.takes_prompts && chunk.position.start + chunk.tokens.len() <= LAST_ROW_POSITION + 1;
        let (short, long): (Vec<_>, Vec<_>) = chunks.iter().partition(as_rows);
        if !short.is_empty() {
            let size = short.iter().map(|chunk| chunk.tokens.len()).sum::<usize>().next_power_of_two();
            let mut rows: Vec<Row> = short.into_iter().flat_map(PromptChunk::rows).collect();
            rows.resize(size, Row::IDLE);
            let graph = self.record(Pass::Prompt, size);
            let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
            graph.set_rows(&rows);
            graph.replay();
            graph.rows = rows;
        }
        let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        for PromptChunk { tokens, position } in long {
            let tokens = token_tensor(tokens, [1, tokens.len()], &self.model.device());
            self.model.prefill(tokens, &mut lock(&self.state).cache, *position);
        }
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
        let graph = self.record(Pass::Step, size);
        let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        graph.set_rows(&rows);
        ModelStep { size, rows: graph.step() }
    }

    fn start_next(&mut self, count: usize) -> Option<ModelStep> {
        let size = count.next_power_of_two();
        let graph = self.graphs.get_mut(&(Pass::Step, size)).filter(|graph| graph.graph.is_hardware())?;
        let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        Some(ModelStep { size, rows: graph.step() })
    }

    fn finish(&mut self, step: ModelStep) -> Result<Vec<Row>, LlamaError> {
        let _not_recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        let rows = step.rows.wait();
        if let Some(graph) = self.graphs.get_mut(&(Pass::Step, step.size)) {
            graph.rows = rows.as_ref().map_or_else(|_| Vec::new(), Clone::clone);
        }
        Ok(rows?)
    }
}

impl PromptChunk {
    /// A row for each token.
    fn rows(&self) -> impl Iterator<Item = Row> {
        let CachePosition { slot, start } = self.position;
        let row = move |(i, &token)| Row { token, state: RowState::At((start + i) as u32), slot: slot as u32, ..Row::IDLE };
        self.tokens.iter().enumerate().map(row)
    }
}

/// A panic between two operations leaves tensors, which are never half written.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
