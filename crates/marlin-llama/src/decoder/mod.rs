//! Decode of several sequences at once, each with its own sampling and end; they join and leave
//! between steps.

mod engine;
mod scheduler;

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::StreamId;
use marlin_decode::ahead::CompiledAhead;

use self::engine::ModelEngine;
use self::scheduler::Scheduler;
use crate::sampling::{Sampling, SamplingError};
use crate::suppression::Suppression;
use crate::{LlamaError, LlamaModel};

/// Most sequences of a step.
pub const MAX_SEQUENCES: usize = 128;

/// The continuation of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceOptions {
    /// The choice of the next token.
    pub sampling: Sampling,
    /// Tokens that may not come next. While a sequence has bad words of two tokens and more, a step
    /// waits for the tokens of the last one.
    pub suppression: Suppression,
    /// The seed of the random choices: with the same one a prompt is continued in the same way,
    /// whatever other sequences there are.
    pub seed: u64,
    /// Tokens that end the sequence.
    pub stop_tokens: Vec<u32>,
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
}

/// The reason that a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model chose one of the stop tokens, this one.
    StopToken(u32),
    /// The requested number of tokens was reached.
    MaxNewTokens,
    /// The cache has no room for more.
    CacheFull,
    /// The caller that gets the text wanted no more ([`Llama::generate`](crate::Llama::generate)).
    Stopped,
}

/// The outcome of a step for one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded {
    /// The sequence, as [`Decoder::join`] named it.
    pub slot: usize,
    /// The next token; none for a stop token and a failure.
    pub token: Option<u32>,
    /// The reason why it ended, if it did. It has left then, and its slot may be reused.
    pub end: Option<Result<StopReason, SamplingError>>,
}

/// Decodes several sequences with a model, one token of each a step, and reads the prompts of
/// others meanwhile.
///
/// On CUDA a step is one replayed graph: the chosen token goes to the next step on the device, and
/// the host reads it afterwards. A graph is recorded for 1, 2, 4, .. rows at the first step of that
/// many sequences, and kept. Elsewhere the same step runs operation by operation.
///
/// # Threads
/// A decoder can be made and used on any thread, and moved between them. Graphs are only in order
/// with work on their own stream of the device, and can only be recorded on the stream that the
/// model's weights are on. So all of a decoder's work is on that one: the stream of the thread that
/// made the model. Decoders wait for each other while one of them records. CubeCL cannot keep out
/// anything else that the program launches on the stream meanwhile, and would record it: until the
/// first steps are done, or a [`warm_up`](Self::warm_up) for one sequence is, leave the device to
/// the decoders.
pub struct Decoder {
    /// The stream of the model's weights.
    stream: StreamId,
    scheduler: Scheduler<ModelEngine>,
}

/// A decoder can be moved to the thread that uses it.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Decoder>();
};

impl Decoder {
    /// A decoder for up to `slots` sequences of the model's window each, without any.
    ///
    /// # Errors
    /// [`LlamaError::TooManySequences`] outside 1 to [`MAX_SEQUENCES`],
    /// [`LlamaError::CacheTooLarge`] if a cache of that many does not fit the device, before
    /// anything is allocated.
    pub fn new(model: Arc<LlamaModel>, slots: usize) -> Result<Self, LlamaError> {
        if slots == 0 || slots > MAX_SEQUENCES {
            return Err(LlamaError::TooManySequences {
                asked: slots,
                room: MAX_SEQUENCES,
            });
        }
        let (stream, window, vocab_size) =
            (model.stream(), model.max_len(), model.config().vocab_size);
        let engine = stream.executes(|| ModelEngine::new(model, slots))?;
        Ok(Self {
            stream,
            scheduler: Scheduler::new(engine, slots, window, vocab_size),
        })
    }

    /// Runs a prompt of `prompt_tokens` tokens and a step of one sequence ahead of time, and
    /// returns the time that this took.
    ///
    /// Warmed up afterwards:
    /// - a prompt of that length, at most the model's window: its kernels are compiled, and Burn
    ///   has autotuned its operations for these shapes;
    /// - a step of one sequence: its kernels are compiled, and where the device records graphs, its
    ///   graph is recorded.
    ///
    /// Not warmed up:
    /// - steps of more sequences: the first step of 2, 4, 8, .. rows compiles its kernels and
    ///   records its graph;
    /// - prompts of other lengths: the first of another length compiles and records, too, where
    ///   lengths are rounded up to 1, 2, 3, 4, 6, 8, 12, .. tokens. Past 512 tokens, on a device or
    ///   in a dtype whose prompts are matrices, a chunk of another length may compile and autotune
    ///   again.
    ///
    /// The prompt is written to the first slot, where the next sequence overwrites it. On a device
    /// that runs steps in Burn's own operations (Flex, autodiff, a runtime that lacks a feature of
    /// the kernels) this does nothing and returns zero.
    ///
    /// # Panics
    /// Panics if a sequence has joined.
    pub fn warm_up(&mut self, prompt_tokens: usize) -> Duration {
        assert!(self.sequences() == 0, "a sequence has joined");
        self.stream
            .executes(|| self.scheduler.engine_mut().warm_up(prompt_tokens))
    }

    /// Compiles the kernels of a step of one sequence, and of a prompt of `prompt_tokens` tokens,
    /// on all cores, where the device is CUDA's; elsewhere it does nothing.
    ///
    /// CubeCL compiles on one core what it does not find in its cache on disk, so the cache must be
    /// on (`compilation.cache` of its configuration); in a process whose kernels are there already
    /// this is of no use. A [`warm_up`](Self::warm_up) afterwards finds nearly all of its kernels
    /// compiled.
    ///
    /// Each operation runs once, on as many further streams of the card as the machine has cores,
    /// with memory for its operands until it is done: the weight of the head and the caches of one
    /// layer among them.
    pub fn compile_ahead(&mut self, prompt_tokens: usize) -> CompiledAhead {
        self.stream
            .executes(|| self.scheduler.engine_mut().compile_ahead(prompt_tokens))
    }

    /// Sets the most tokens of prompts that a step reads while other sequences are running, which
    /// wait for them: fewer tokens are a shorter wait, more are read faster. At first it is the
    /// most that is possible, as many as are read while none is running: 1024 where attention runs
    /// on tensor cores, 512 elsewhere.
    pub fn set_prefill_chunk(&mut self, tokens: usize) {
        self.scheduler.engine_mut().set_chunk(tokens);
    }

    /// Queues a prompt, which the next steps read, and returns the sequence's slot at once.
    ///
    /// # Errors
    /// [`LlamaError::EmptyPrompt`], [`LlamaError::PromptTooLong`], [`LlamaError::Token`] for a
    /// token outside the vocabulary, [`LlamaError::Sampling`] for options outside their range and
    /// empty bad words, [`LlamaError::TooManySequences`] where every slot is in use.
    pub fn join(&mut self, prompt: &[u32], options: &SequenceOptions) -> Result<usize, LlamaError> {
        self.stream
            .executes(|| self.scheduler.join(prompt, options))
    }

    /// Removes a sequence, whether it ended or not, and whether its prompt was read or not.
    pub fn leave(&mut self, slot: usize) {
        self.scheduler.leave(slot);
    }

    /// Sequences that have joined and not left.
    pub fn sequences(&self) -> usize {
        self.scheduler.sequences()
    }

    /// Sequences of these whose prompts are not read to the end.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// True if steps are replayed as graphs of the device; false before the first one.
    pub fn is_captured(&self) -> bool {
        self.scheduler.engine().is_captured()
    }

    /// Reads queued prompts, and returns one token for each sequence whose prompt is read, in the
    /// order of their slots; none if no sequence has joined.
    ///
    /// Prompts are read oldest first, in chunks ([`set_prefill_chunk`](Self::set_prefill_chunk)). A
    /// step reads one chunk, or several short prompts of as many tokens together, so that the
    /// sequences that are running have a token each step; where attention runs on tensor cores they
    /// go on in the same pass. Where none is running it reads until the oldest prompt is at its
    /// end.
    ///
    /// The pass that reads the end of a prompt also chooses its first token. On a device that
    /// replays graphs the next step is already running when this one's tokens are returned; a
    /// sequence whose prompt was read meanwhile has its second token one step later.
    ///
    /// # Errors
    /// The device fails. A sequence whose logits are broken ends with its error in
    /// [`Decoded::end`]; the others continue.
    pub fn step(&mut self) -> Result<Vec<Decoded>, LlamaError> {
        self.stream.executes(|| self.scheduler.step())
    }
}
