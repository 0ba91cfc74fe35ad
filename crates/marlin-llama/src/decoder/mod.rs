//! Decoding of several sequences at once. Each has its own sampling options and end, and joins and
//! leaves between steps.

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

/// The largest number of sequences in a step.
pub const MAX_SEQUENCES: usize = 128;

/// Options for the continuation of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceOptions {
    /// The choice of the next token.
    pub sampling: Sampling,
    /// Tokens that may not come next. While a sequence has bad words of two or more tokens, a step
    /// waits for the tokens of the previous step.
    pub suppression: Suppression,
    /// The seed of the random choices. With the same seed a prompt is continued in the same way,
    /// whatever other sequences are running.
    pub seed: u64,
    /// Tokens that end the sequence.
    pub stop_tokens: Vec<u32>,
    /// The largest number of tokens to generate.
    pub max_new_tokens: usize,
}

/// The reason that a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model chose this stop token.
    StopToken(u32),
    /// The requested number of tokens was reached.
    MaxNewTokens,
    /// The KV cache has no room for another token.
    CacheFull,
    /// The caller that receives the text stopped it ([`Llama::generate`](crate::Llama::generate)).
    Stopped,
}

/// The outcome of a step for one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded {
    /// The slot of the sequence, as returned by [`Decoder::join`].
    pub slot: usize,
    /// The next token; `None` for a stop token or a failure.
    pub token: Option<u32>,
    /// The reason why the sequence ended, if it did. The sequence has then left, and its slot may
    /// be reused.
    pub end: Option<Result<StopReason, SamplingError>>,
}

/// Decodes several sequences with a model, one token of each sequence per step, and reads the
/// prompts of new sequences meanwhile.
///
/// On CUDA a step is one replayed graph: the chosen token goes to the next step on the device, and
/// the host reads it afterwards. A graph is recorded for 1, 2, 4, .. rows at the first step of that
/// many sequences, and kept. On other devices the same step runs operation by operation.
///
/// # Threads
/// A decoder can be created and used on any thread, and moved between threads. Graphs are ordered
/// only with work on their own stream of the device, and can only be recorded on the stream of the
/// model's weights. All of a decoder's work is therefore on that stream: the stream of the thread
/// that created the model. While one decoder records a graph, the others wait. CubeCL cannot
/// exclude other work that the program launches on the stream during a recording, and would record
/// it. Leave the device to the decoders until the first steps, or a [`warm_up`](Self::warm_up) for
/// one sequence, are done.
pub struct Decoder {
    /// The stream of the model's weights.
    stream: StreamId,
    scheduler: Scheduler<ModelEngine>,
}

/// Checks that a decoder can be moved to the thread that uses it.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Decoder>();
};

impl Decoder {
    /// Creates a decoder without sequences, with room for up to `slots` sequences of the model's
    /// window each.
    ///
    /// # Errors
    /// [`LlamaError::TooManySequences`] outside 1 to [`MAX_SEQUENCES`],
    /// [`LlamaError::CacheTooLarge`] if a KV cache of `slots` sequences does not fit the device,
    /// before anything is allocated.
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
    /// The call warms up:
    /// - a prompt of that length, at most the model's window: its kernels are compiled, and Burn
    ///   has autotuned its operations for these shapes;
    /// - a step of one sequence: its kernels are compiled, and if the device records graphs, its
    ///   graph is recorded.
    ///
    /// The call does not warm up:
    /// - steps of more sequences: the first step of 2, 4, 8, .. rows compiles its kernels and
    ///   records its graph;
    /// - prompts of other lengths: the first prompt of another length, rounded up to 1, 2, 3, 4, 6,
    ///   8, 12, .. tokens, also compiles and records. Beyond 512 tokens, on a device or in a dtype
    ///   that reads prompts as matrices, a chunk of another length may compile and autotune again.
    ///
    /// The prompt is written to the first slot, where the next sequence overwrites it. On a device
    /// that runs steps in Burn's own operations (Flex, autodiff, a runtime that lacks a feature of
    /// the kernels) the call does nothing and returns zero.
    ///
    /// # Panics
    /// Panics if a sequence has joined.
    pub fn warm_up(&mut self, prompt_tokens: usize) -> Duration {
        assert!(self.sequences() == 0, "a sequence has joined");
        self.stream
            .executes(|| self.scheduler.engine_mut().warm_up(prompt_tokens))
    }

    /// Compiles the kernels of a step of one sequence, and of a prompt of `prompt_tokens` tokens,
    /// on all cores. On devices other than CUDA it does nothing.
    ///
    /// CubeCL compiles kernels that it does not find in its cache on disk on one core, so the cache
    /// must be on (`compilation.cache` of its configuration). If the cache already has the kernels,
    /// the call is of no use. A [`warm_up`](Self::warm_up) afterwards finds nearly all of its
    /// kernels compiled.
    ///
    /// Each operation runs once. The operations are spread over additional streams of the card, as
    /// many as the machine has cores. Each holds memory for its operands until it is done, among
    /// them the weight of the head and the caches of one layer.
    pub fn compile_ahead(&mut self, prompt_tokens: usize) -> CompiledAhead {
        self.stream
            .executes(|| self.scheduler.engine_mut().compile_ahead(prompt_tokens))
    }

    /// Sets the largest number of prompt tokens that a step reads while other sequences are
    /// running. The running sequences wait for these tokens: fewer tokens mean a shorter wait, more
    /// are read faster. The default is the largest possible number, which is also read while no
    /// sequence is running: 1024 if attention runs on tensor cores, otherwise 512.
    pub fn set_prefill_chunk(&mut self, tokens: usize) {
        self.scheduler.engine_mut().set_chunk(tokens);
    }

    /// Queues a prompt, which the next steps read, and returns the sequence's slot at once.
    ///
    /// # Errors
    /// [`LlamaError::EmptyPrompt`], [`LlamaError::PromptTooLong`], [`LlamaError::Token`] for a
    /// token outside the vocabulary, [`LlamaError::Sampling`] for options outside their range and
    /// empty bad words, [`LlamaError::TooManySequences`] if every slot is in use.
    pub fn join(&mut self, prompt: &[u32], options: &SequenceOptions) -> Result<usize, LlamaError> {
        self.stream
            .executes(|| self.scheduler.join(prompt, options))
    }

    /// Removes a sequence, whether or not it has ended or its prompt was read.
    pub fn leave(&mut self, slot: usize) {
        self.scheduler.leave(slot);
    }

    /// Returns the number of sequences that have joined and not left.
    pub fn sequences(&self) -> usize {
        self.scheduler.sequences()
    }

    /// Returns the number of joined sequences whose prompts are not yet fully read.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Returns true if steps are replayed as graphs of the device; false before the first step.
    pub fn is_captured(&self) -> bool {
        self.scheduler.engine().is_captured()
    }

    /// Reads queued prompts, and returns one token for each sequence whose prompt is read, in the
    /// order of their slots. The result is empty if no sequence has joined.
    ///
    /// Prompts are read oldest first, in chunks ([`set_prefill_chunk`](Self::set_prefill_chunk)). A
    /// step reads one chunk, or several short prompts with at most as many tokens together, so that
    /// each running sequence gets a token in each step. If attention runs on tensor cores, the
    /// running sequences continue in the same pass. If no sequence is running, a step reads until
    /// the oldest prompt is complete.
    ///
    /// The pass that reads the end of a prompt also chooses its first token. On a device that
    /// replays graphs the next step is already running when the tokens of this step are returned. A
    /// sequence whose prompt was read meanwhile gets its second token one step later.
    ///
    /// # Errors
    /// An error if the device fails. A sequence whose logits are broken ends with its error in
    /// [`Decoded::end`]; the others continue.
    pub fn step(&mut self) -> Result<Vec<Decoded>, LlamaError> {
        self.stream.executes(|| self.scheduler.step())
    }
}
