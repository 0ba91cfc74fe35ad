//! Runs a model on a device: reads prompts into the KV cache, and runs steps as recorded graphs.

mod ahead;
mod graph;
mod operations;
mod prompts;
mod ranks;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use burn::tensor::capture;
use marlin_nn::{self as decode, CacheFormat, Pages, SequenceState, TokenLogprobs, TokenTable};

use self::graph::{ModelStep, Operations, Pass, PassGraph, State, lock};
use self::prompts::PromptRows;
pub(super) use self::ranks::{ModelExecutors, RanksStep};
use super::scheduler::PromptChunk;
use crate::model::CachePosition;
use crate::{KvCache, Model, ModelError};

/// The lock that is held for writing while a step is recorded, and for reading by all other work of
/// engines. CUDA would include work of other threads in the recording if it shares the stream, and
/// fail the recording if it allocates on any stream or device.
///
/// Work of a split model is run by several threads, which wait for each other: rank 0 holds the
/// lock for all of them ([`ModelExecutors`]). A rank that waited for the lock while another held it
/// in an exchange would never get it.
static RECORDING: RwLock<()> = RwLock::new(());

/// The pages of a KV cache and their format; `None` for a cache without pages.
type CachePages = Option<(Pages, CacheFormat)>;

/// Holds the lock of recordings for work of a model; `None` if rank 0 of its ranks does.
fn not_recording(model: &Model) -> Option<RwLockReadGuard<'static, ()>> {
    (!model.is_split()).then(hold_recordings)
}

/// Holds the lock of recordings for reading.
fn hold_recordings() -> RwLockReadGuard<'static, ()> {
    RECORDING.read().unwrap_or_else(PoisonError::into_inner)
}

/// A model with its KV cache and recorded graphs. All functions must be called on the stream of the
/// model.
struct ModelExecutor {
    model: Arc<Model>,
    state: Arc<Mutex<State>>,
    slots: usize,
    graphs: BTreeMap<Pass, PassGraph>,
    prompts: PromptRows,
    /// The largest number of prompt tokens in a pass while no sequence is running.
    idle_chunk: usize,
    /// The largest number of prompt tokens in a pass while a sequence is running.
    running_chunk: usize,
}

/// The last position of a sequence that continues in a pass of prompts. In such a pass one block
/// for each head reads all keys and values before a row, which a step shares among many blocks, so
/// from some position on a separate step costs less. Estimated, not measured: a block takes about
/// 2.5 us for 64 positions, so 80 us for a layer at this position, and a step beside the prompts
/// 2.2 ms (Llama 2 7B, 16 sequences, H200). With sequences up to this position in the pass, 8
/// prompts of 1024 tokens took 198 ms on that card, and 206 ms with separate steps on the day
/// before.
const LAST_MIXED_POSITION: usize = 2047;
/// The number of last rows of prompts in a recorded pass, if it is enough: the most rows that the
/// kernel of a float head supports.
const FEW_LAST_ROWS: usize = 32;

impl ModelExecutor {
    /// Checks that the device has room for the KV cache of an executor, and its format.
    ///
    /// # Errors
    /// [`ModelError::CacheTooLarge`], [`ModelError::E4m3Cache`].
    fn check(model: &Model, slots: usize, pages: CachePages) -> Result<(), ModelError> {
        let (config, device, dtype) = (model.config(), model.device(), model.dtype());
        let (max_len, prompts) = (model.max_len(), PromptRows::of(model));
        let (parts, positions, needed) = match pages {
            None => (
                slots,
                max_len,
                KvCache::size_bytes(config, slots, max_len, dtype),
            ),
            Some((Pages { count, size }, format)) => {
                let page = KvCache::page_bytes(config, size, format, dtype);
                (count, size, page.saturating_mul(count))
            }
        };
        if pages.is_some_and(|(_, format)| format == CacheFormat::E4m3)
            && prompts != PromptRows::All
        {
            return Err(ModelError::E4m3Cache);
        }
        let needed = needed.saturating_mul(model.ranks_in_memory());
        match burn_marlin::device::free_memory(&device).filter(|&free| free < needed) {
            None => Ok(()),
            Some(free) => Err(ModelError::CacheTooLarge {
                parts,
                positions,
                needed,
                free,
            }),
        }
    }

    /// Creates an executor with an empty KV cache of `slots` sequences, which share `pages` if
    /// given, and no graphs.
    fn new(model: Arc<Model>, slots: usize, pages: CachePages) -> Self {
        let (config, device, dtype) = (model.config(), model.device(), model.dtype());
        let (max_len, prompts) = (model.max_len(), PromptRows::of(&model));
        let _not_recording = not_recording(&model);
        let cache = match pages {
            None => KvCache::new(config, slots, max_len, dtype, &device),
            Some((pages, format)) => {
                KvCache::paged(config, slots, max_len, pages, format, dtype, &device)
            }
        };
        let words = TokenTable::words(config.vocab_size);
        let token_table = decode::words([TokenTable::row(slots, 0), words], &device);
        let chunk = prompts.chunk();
        let state = Arc::new(Mutex::new(State { cache, token_table }));
        Self {
            model,
            state,
            slots,
            graphs: BTreeMap::new(),
            prompts,
            idle_chunk: chunk,
            running_chunk: chunk,
        }
    }

    /// Implements [`Engine::warm_up`](super::Engine::warm_up).
    fn warm_up(&mut self, prompt_tokens: usize) -> Duration {
        if !decode::has_kernels(&self.model.device()) {
            return Duration::ZERO;
        }
        let start = Instant::now();
        let tokens = vec![0; prompt_tokens.clamp(1, self.model.max_len())];
        let size = self.chunk(false);
        let last = tokens.len().div_ceil(size) - 1;
        for (chunk, tokens) in tokens.chunks(size).enumerate() {
            let position = CachePosition {
                slot: 0,
                start: chunk * size,
            };
            // An idle row chooses no token.
            let end = (chunk == last).then_some(SequenceState::IDLE);
            self.prefill(&[PromptChunk {
                tokens: tokens.to_vec(),
                position,
                end,
            }]);
        }
        self.record(Pass::Step {
            rows: 1,
            logprobs: false,
        });
        start.elapsed()
    }

    /// Implements [`Engine::set_prefill_chunk`](super::Engine::set_prefill_chunk).
    fn set_chunk(&mut self, tokens: usize) {
        self.running_chunk = tokens.clamp(1, self.idle_chunk);
    }

    fn is_captured(&self) -> bool {
        self.graphs.iter().any(|(pass, graph)| {
            matches!(pass, Pass::Step { .. }) && graph.operations.is_hardware()
        })
    }

    /// Writes a bitmap of tokens to a row of a slot in the token table.
    fn write_bitmap(&mut self, slot: usize, row: usize, tokens: &[u32]) {
        let bitmap = decode::bitmap(tokens, self.model.config().vocab_size);
        self.write_words(slot, row, bitmap);
    }

    /// Writes words to the token table, from a row of a slot on.
    fn write_words(&mut self, slot: usize, row: usize, words: Vec<u32>) {
        let _not_recording = not_recording(&self.model);
        let words = words.into_iter().map(u32::cast_signed).collect();
        let table = &mut lock(&self.state).token_table;
        decode::write_words(table, TokenTable::row(slot, row), words);
    }

    /// Sets the suppressed tokens of a slot's sequence for the work that follows, as a bitmap.
    fn set_suppressed_bitmap(&mut self, slot: usize, bitmap: Vec<u32>) {
        self.write_words(slot, TokenTable::SUPPRESSED, bitmap);
    }

    /// Sets the first pages of a slot for the work that follows; see [`KvCache::set_pages`].
    fn set_pages(&mut self, slot: usize, pages: &[u32]) {
        let _not_recording = not_recording(&self.model);
        lock(&self.state).cache.set_pages(slot, pages);
    }

    /// Returns true if the device records graphs and runs them beside the host.
    fn runs_ahead(&self) -> bool {
        self.graphs
            .values()
            .next()
            .is_some_and(|graph| graph.operations.is_hardware())
    }

    /// Starts the step that follows the last step of `size` rows, where some rows are replaced. The
    /// other rows continue with the tokens that the last step chose, on the device. Both steps
    /// compute log probabilities, or neither does.
    ///
    /// # Panics
    /// Panics if there was no such step.
    fn start_replaced(
        &mut self,
        size: usize,
        replaced: &[(usize, SequenceState)],
        logprobs: bool,
    ) -> ModelStep {
        let pass = Pass::Step {
            rows: size,
            logprobs,
        };
        let model = self.model.clone();
        let graph = self.record(pass);
        let _not_recording = not_recording(&model);
        for &(index, row) in replaced {
            decode::write_rows(&mut lock(&graph.batch).rows, index, &[row]);
        }
        // The rows that are known to the host are those before the last step.
        graph.rows.clear();
        graph.step(pass)
    }

    /// Returns the graph of a pass, and records it the first time.
    fn record(&mut self, pass: Pass) -> &mut PassGraph {
        let Self {
            model,
            state,
            slots,
            graphs,
            ..
        } = self;
        graphs.entry(pass).or_insert_with(|| {
            let is_recordable = model.is_recordable();
            let _recording =
                is_recordable.then(|| RECORDING.write().unwrap_or_else(PoisonError::into_inner));
            let _not_recording = match is_recordable {
                true => None,
                false => not_recording(model),
            };
            // Idle rows change nothing while the graph is warmed up and recorded.
            let batch = Arc::new(Mutex::new(pass.batch(model, *slots)));
            let (device, model, state, of_pass) =
                (model.device(), model.clone(), state.clone(), batch.clone());
            let run: Box<dyn FnMut() + Send> = Box::new(move || {
                let State { cache, token_table } = &mut *lock(&state);
                model.pass(&mut lock(&of_pass), cache, token_table);
            });
            let operations = match is_recordable {
                true => Operations::Graph(capture(&device, run)),
                false => Operations::Unrecorded(run),
            };
            match operations.is_hardware() {
                true => tracing::debug!(?pass, "recorded a graph"),
                false => tracing::info!(?pass, "no graph was recorded: operations run one by one"),
            }
            let rows = if let Pass::Step { rows, .. } = pass {
                vec![SequenceState::IDLE; rows]
            } else {
                Vec::new()
            };
            PassGraph {
                batch,
                operations,
                rows,
            }
        })
    }

    /// Returns the numbers of rows, and of last rows of prompts, in a pass for `rows` and
    /// `last_rows`. If passes are recorded, the numbers are rounded up so that there are few
    /// graphs. Additional last rows cost next to nothing, since the head's weight is read once for
    /// all of them.
    fn rounded(&self, rows: usize, last_rows: usize) -> [usize; 2] {
        if self.prompts == PromptRows::Last {
            return [rows, last_rows];
        }
        let power = rows.next_power_of_two();
        let rows = if power >= 4 && rows <= power / 4 * 3 {
            power / 4 * 3
        } else {
            power
        };
        let few = self.slots.min(FEW_LAST_ROWS);
        match last_rows {
            last_rows if last_rows == 0 || self.prompts == PromptRows::First => [rows, last_rows],
            last_rows if last_rows <= few => [rows, few],
            _ => [rows, self.slots],
        }
    }

    /// Runs rows of prompts through the model. `last_rows` are the last rows of the prompts that
    /// end.
    fn read_rows(
        &mut self,
        mut rows: Vec<SequenceState>,
        mut last_rows: Vec<SequenceState>,
    ) -> Option<ModelStep> {
        let [size, count] = self.rounded(rows.len(), last_rows.len());
        rows.resize(size, SequenceState::IDLE);
        last_rows.resize(count, SequenceState::IDLE);
        let pass = Pass::Prompts {
            rows: size,
            last_rows: count,
            logprobs: want_logprobs(&last_rows),
        };
        if self.prompts != PromptRows::Last {
            let model = self.model.clone();
            let graph = self.record(pass);
            let _not_recording = not_recording(&model);
            lock(&graph.batch).set_prompts(&rows, &last_rows);
            graph.replay();
            let batch = lock(&graph.batch);
            return Some(ModelStep::new(pass, &batch, batch.last_rows()?));
        }
        let _not_recording = not_recording(&self.model);
        let mut batch = pass.batch(&self.model, self.slots);
        batch.set_prompts(&rows, &last_rows);
        let State { cache, token_table } = &mut *lock(&self.state);
        self.model.pass(&mut batch, cache, token_table);
        Some(ModelStep::new(pass, &batch, batch.last_rows()?))
    }

    /// Waits for a step and returns its rows, each with the log probabilities of its token if the
    /// row asked for them. Steps are finished in the order in which they were started.
    fn finish_with_logprobs(
        &mut self,
        step: ModelStep,
    ) -> Result<Vec<(SequenceState, Option<TokenLogprobs>)>, ModelError> {
        let ModelStep {
            pass,
            rows,
            logprobs,
        } = step;
        let _not_recording = not_recording(&self.model);
        let rows = rows.wait();
        if let (Pass::Step { .. }, Some(graph)) = (pass, self.graphs.get_mut(&pass)) {
            graph.rows = rows.as_ref().map_or_else(|_| Vec::new(), Clone::clone);
        }
        let rows = rows?;
        let logprobs = match logprobs {
            Some(read) => read.wait(&rows)?,
            None => vec![None; rows.len()],
        };
        Ok(rows.into_iter().zip(logprobs).collect())
    }
}

/// Returns true if a row asks for log probabilities.
fn want_logprobs(rows: &[SequenceState]) -> bool {
    rows.iter().any(|row| row.logprobs.is_some())
}
