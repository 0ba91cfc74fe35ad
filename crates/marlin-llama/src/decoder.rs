//! Decode of several sequences at once, each with its own sampling and end; they join and leave between steps.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use burn::tensor::{Graph, Int, Tensor, capture};
use burn_marlin::decode::{self, Row, RowState, RowsRead};

use crate::generate::token_tensor;
use crate::model::{Batch, Place};
use crate::sampling::{Sampling, SamplingError};
use crate::{KvCache, LlamaError, LlamaModel};

/// Most sequences of a step.
pub const MAX_SEQUENCES: usize = 128;
/// Tokens of a prompt that go through the model at once: enough to be bound by arithmetic, few enough that the scores of a long prompt fit.
const PREFILL_CHUNK: usize = 512;

/// How a sequence goes on after its prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceOptions {
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// The seed of the random choices: with the same one a prompt goes on the same, whatever other sequences there are.
    pub seed: u64,
    /// Tokens that end the sequence.
    pub stop_tokens: Vec<u32>,
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model chose one of the stop tokens, this one.
    StopToken(u32),
    /// There are as many tokens as were asked for.
    MaxNewTokens,
    /// The cache has no room for more.
    CacheFull,
}

/// What a step gave one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded {
    /// The sequence, as [`Decoder::join`] named it.
    pub slot: usize,
    /// The token that it goes on with; none for a stop token and a failure.
    pub token: Option<u32>,
    /// Whether it ended, and why. It has left, and its slot may be another's.
    pub end: Option<Result<StopReason, SamplingError>>,
}

/// Takes sequences through a model, one token of each a step.
///
/// On CUDA a step is one replayed graph: the chosen token goes to the next step on the device, and the host reads it afterwards. A graph is recorded for 1, 2, 4, ..
/// rows at the first step of so many sequences, and kept. Elsewhere the same step runs operation by operation.
///
/// A decoder belongs to the thread that made it: its graphs run in order with that thread's other work on the device, and only with that.
pub struct Decoder<'m> {
    model: &'m LlamaModel,
    state: Rc<RefCell<State>>,
    graphs: BTreeMap<usize, StepGraph<'m>>,
    /// By slot.
    sequences: Vec<Option<Sequence>>,
    /// Sequences that ever joined.
    joined: u64,
    /// The step after the last one whose tokens the host has.
    ahead: Option<Step>,
}

/// What all steps read and write.
struct State {
    cache: KvCache,
    /// [slots, vocab / 32 up].
    seen: Tensor<2, Int>,
}

/// A step for a number of rows.
struct StepGraph<'m> {
    batch: Rc<RefCell<Batch>>,
    graph: Graph<(), Box<dyn FnMut() + 'm>>,
    /// The rows that the device holds.
    rows: Vec<Row>,
}

/// A step that was given to the device.
struct Step {
    /// Slots and names of the sequences of its rows.
    sequences: Vec<(usize, u64)>,
    rows: RowsRead,
}

struct Sequence {
    /// No other sequence of this decoder has it.
    id: u64,
    row: Row,
    /// Tokens that may follow.
    left: usize,
    stop_tokens: Vec<u32>,
}

impl<'m> Decoder<'m> {
    /// A decoder for up to `slots` sequences of the model's window each, without any.
    ///
    /// # Errors
    /// [`LlamaError::TooManySequences`] outside 1 to [`MAX_SEQUENCES`], [`LlamaError::CacheTooLarge`] where the cache of so many does not fit the
    /// device, before anything is allocated.
    pub fn new(model: &'m LlamaModel, slots: usize) -> Result<Self, LlamaError> {
        if slots == 0 || slots > MAX_SEQUENCES {
            return Err(LlamaError::TooManySequences { asked: slots, room: MAX_SEQUENCES });
        }
        let (config, device, dtype) = (model.config(), model.device(), model.dtype());
        let needed = KvCache::size_bytes(config, slots, model.max_len(), dtype);
        if let Some(free) = burn_marlin::free_memory(&device).filter(|&free| free < needed) {
            return Err(LlamaError::CacheTooLarge { slots, positions: model.max_len(), needed, free });
        }
        let cache = KvCache::new(config, slots, model.max_len(), dtype, &device);
        let seen = decode::words([slots, config.vocab_size.div_ceil(32)], &device);
        let state = Rc::new(RefCell::new(State { cache, seen }));
        Ok(Self { model, state, graphs: BTreeMap::new(), sequences: (0..slots).map(|_| None).collect(), joined: 0, ahead: None })
    }

    /// Compiles and records what a prompt of so many tokens and a step of one sequence need, so that neither takes its time later. What it writes to the
    /// cache is written over by the next prompt. Gives the time it took: none where steps do not run as graphs, since there is nothing to prepare.
    ///
    /// # Panics
    /// Where a sequence is in.
    pub fn warm_up(&mut self, prompt_tokens: usize) -> Duration {
        assert!(self.sequences() == 0, "a sequence is in");
        if !decode::has_kernels(&self.model.device()) {
            return Duration::ZERO;
        }
        let start = Instant::now();
        self.prefill(&vec![0; prompt_tokens.clamp(1, self.model.max_len()) - 1], 0);
        self.graph(1);
        start.elapsed()
    }

    /// Takes tokens through the model to the beginning of a slot.
    fn prefill(&mut self, tokens: &[u32], slot: usize) {
        let cache = &mut self.state.borrow_mut().cache;
        for (chunk, tokens) in tokens.chunks(PREFILL_CHUNK).enumerate() {
            let tokens = token_tensor(tokens, [1, tokens.len()], &self.model.device());
            self.model.prefill(tokens, cache, Place { slot, start: chunk * PREFILL_CHUNK });
        }
    }

    /// Takes a prompt in: its tokens but the last go through the model, in chunks; the last one is the next step's. Gives the sequence's slot.
    ///
    /// # Errors
    /// [`LlamaError::EmptyPrompt`], [`LlamaError::PromptTooLong`], [`LlamaError::Token`] for a token outside the vocabulary,
    /// [`LlamaError::Sampling`] for options outside their range, [`LlamaError::TooManySequences`] where every slot is in use.
    pub fn join(&mut self, prompt: &[u32], options: &SequenceOptions) -> Result<usize, LlamaError> {
        options.sampling.validate()?;
        let (room, vocab_size) = (self.model.max_len(), self.model.config().vocab_size);
        let Some((&last, before)) = prompt.split_last() else { return Err(LlamaError::EmptyPrompt) };
        if prompt.len() > room {
            return Err(LlamaError::PromptTooLong { tokens: prompt.len(), room });
        }
        if let Some((position, &token)) = prompt.iter().enumerate().find(|&(_, &token)| token as usize >= vocab_size) {
            return Err(LlamaError::Token { token, position, vocab_size });
        }
        let Some(slot) = self.sequences.iter().position(Option::is_none) else {
            return Err(LlamaError::TooManySequences { asked: self.sequences.len() + 1, room: self.sequences.len() });
        };
        self.prefill(before, slot);
        let seen = &mut self.state.borrow_mut().seen;
        decode::write_words(seen, slot, decode::bitmap(prompt, vocab_size).into_iter().map(|word| word as i32).collect());
        let row = options.sampling.row(last, before.len() as u32, slot as u32, options.seed);
        self.joined += 1;
        self.sequences[slot] =
            Some(Sequence { id: self.joined, row, left: options.max_new_tokens, stop_tokens: options.stop_tokens.clone() });
        Ok(slot)
    }

    /// Takes a sequence out, whether it ended or not.
    pub fn leave(&mut self, slot: usize) {
        if let Some(sequence) = self.sequences.get_mut(slot) {
            *sequence = None;
        }
    }

    /// Sequences that are in.
    pub fn sequences(&self) -> usize {
        self.sequences.iter().flatten().count()
    }

    /// Whether steps are replayed as graphs of the device; false before the first one.
    pub fn is_captured(&self) -> bool {
        self.graphs.values().any(|graph| graph.graph.is_hardware())
    }

    /// One token for each sequence, in the order of their slots; none where there is no sequence.
    ///
    /// On a device that replays graphs the next step is under way when this one's tokens come back. A sequence that joined meanwhile has its first
    /// token one step later.
    ///
    /// # Errors
    /// The device fails. A sequence whose logits are broken ends with its error in [`Decoded::end`]; the others go on.
    pub fn step(&mut self) -> Result<Vec<Decoded>, LlamaError> {
        let sequences: Vec<(usize, u64)> =
            self.sequences.iter().enumerate().filter_map(|(slot, sequence)| Some((slot, sequence.as_ref()?.id))).collect();
        let step = match self.ahead.take() {
            Some(step) => step,
            None if sequences.is_empty() => return Ok(Vec::new()),
            None => self.start(sequences.clone()),
        };
        // The same sequences go on, and the device knows all of them: it need not wait for the host.
        let size = step.sequences.len().next_power_of_two();
        let goes_on = step.sequences == sequences && self.sequences.iter().flatten().all(|sequence| sequence.left > 1);
        if goes_on && self.graphs.get(&size).is_some_and(|graph| graph.graph.is_hardware()) {
            self.ahead = Some(self.replay(size, sequences));
        }
        let rows = step.rows.wait()?;
        if let Some(graph) = self.graphs.get_mut(&size) {
            graph.rows.clone_from(&rows);
        }
        Ok(step.sequences.into_iter().zip(rows).filter_map(|((slot, id), row)| self.decoded(slot, id, row)).collect())
    }

    /// Starts a step of sequences whose rows the host knows.
    fn start(&mut self, sequences: Vec<(usize, u64)>) -> Step {
        let size = sequences.len().next_power_of_two();
        let mut rows: Vec<Row> = self.sequences.iter().flatten().map(|sequence| sequence.row).collect();
        rows.resize(size, Row::IDLE);
        let graph = self.graph(size);
        if graph.rows != rows {
            decode::write_rows(&mut graph.batch.borrow_mut().rows, 0, &rows);
        }
        self.replay(size, sequences)
    }

    /// Starts a step of the rows that the device has.
    fn replay(&mut self, size: usize, sequences: Vec<(usize, u64)>) -> Step {
        let graph = self.graph(size);
        // SAFETY: what the graph reads and writes are the model, the state and the batch. The graph's closure owns or borrows them, and they keep
        // their memory: every operation on them writes in place. This decoder is bound to one thread, so all work on them is on one stream.
        unsafe { graph.graph.replay() };
        Step { sequences, rows: decode::start_reading(&graph.batch.borrow().rows) }
    }

    /// The step for a number of rows, recorded the first time.
    fn graph(&mut self, size: usize) -> &mut StepGraph<'m> {
        let (model, state) = (self.model, &self.state);
        self.graphs.entry(size).or_insert_with(|| {
            let device = model.device();
            // Idle rows change nothing while the step is warmed up and recorded.
            let batch = Rc::new(RefCell::new(Batch::idle(size, model.config().num_attention_heads, &device)));
            let (state, of_step) = (state.clone(), batch.clone());
            let step: Box<dyn FnMut() + 'm> = Box::new(move || {
                let State { cache, seen } = &mut *state.borrow_mut();
                model.step(&mut of_step.borrow_mut(), cache, seen);
            });
            let graph = capture(&device, step);
            match graph.is_hardware() {
                true => tracing::debug!(rows = size, "recorded a step"),
                false => tracing::info!(rows = size, "this device records no graphs: steps run operation by operation"),
            }
            StepGraph { batch, graph, rows: vec![Row::IDLE; size] }
        })
    }

    /// What a step gave a sequence, which leaves where it ended; nothing for one that has left.
    fn decoded(&mut self, slot: usize, id: u64, row: Row) -> Option<Decoded> {
        let sequence = self.sequences[slot].as_mut().filter(|sequence| sequence.id == id)?;
        sequence.row = row;
        let token = row.token;
        let decoded = match row.state {
            RowState::Failed | RowState::Idle => Decoded { slot, token: None, end: Some(Err(SamplingError::NoToken)) },
            _ if sequence.stop_tokens.contains(&token) => Decoded { slot, token: None, end: Some(Ok(StopReason::StopToken(token))) },
            state => {
                sequence.left = sequence.left.saturating_sub(1);
                let end = match (sequence.left, state) {
                    (0, _) => Some(Ok(StopReason::MaxNewTokens)),
                    (_, RowState::WindowFull) => Some(Ok(StopReason::CacheFull)),
                    _ => None,
                };
                Decoded { slot, token: Some(token), end }
            }
        };
        if decoded.end.is_some() {
            self.leave(slot);
        }
        Some(decoded)
    }
}
