//! Continuous batching: decodes several sequences at once, each with its own sampling options and
//! end. Requests are added and aborted between steps.

mod batch;
mod executor;
mod scheduler;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::StreamId;
use marlin_nn::ahead::CompiledAhead;

pub use self::batch::{
    AllowedTokens, BatchEngine, BatchOutput, BatchStep, DecodeToken, PromptPart,
};

use self::executor::ModelExecutors;
use self::scheduler::Scheduler;
use crate::sampling::{Sampling, SamplingError};
use crate::suppression::Suppression;
use crate::{Model, ModelError};

/// The largest number of sequences in a step.
pub const MAX_SEQUENCES: usize = 128;

/// Parameters of a request: how a prompt is continued.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestParams {
    /// The choice of the next token.
    pub sampling: Sampling,
    /// What is added to the logits of tokens, by token ID; with -100 or less a token is never
    /// chosen in practice.
    pub logit_bias: BTreeMap<u32, f32>,
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

impl RequestParams {
    /// Parameters that always choose the most likely token, without a limit on the number of tokens
    /// and without stop tokens.
    pub const GREEDY: Self = Self {
        sampling: Sampling::GREEDY,
        logit_bias: BTreeMap::new(),
        suppression: Suppression::NONE,
        seed: 0,
        stop_tokens: Vec::new(),
        max_new_tokens: usize::MAX,
    };

    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`SamplingError::Option`] for an option outside its range, [`SamplingError::EmptyBadWord`],
    /// and [`SamplingError::BiasedToken`].
    fn validate(&self, vocab_size: usize) -> Result<(), SamplingError> {
        self.sampling.validate()?;
        self.suppression.validate()?;
        for (&token, &bias) in &self.logit_bias {
            if token as usize >= vocab_size {
                return Err(SamplingError::BiasedToken { token, vocab_size });
            }
            if !bias.is_finite() {
                return Err(SamplingError::Option {
                    option: "logit_bias",
                    found: bias,
                    expected: "a finite number",
                });
            }
        }
        Ok(())
    }
}

impl Default for RequestParams {
    /// Returns [`GREEDY`](Self::GREEDY).
    fn default() -> Self {
        Self::GREEDY
    }
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
    /// The caller that receives the text stopped it
    /// ([`LanguageModel::generate`](crate::LanguageModel::generate)).
    Stopped,
}

/// The outcome of a step for one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput {
    /// The slot of the sequence, as returned by [`Engine::add_request`].
    pub slot: usize,
    /// The next token; `None` for a stop token or a failure.
    pub token: Option<u32>,
    /// The reason why the sequence ended, if it did. The sequence has then been removed, and
    /// its slot may be reused.
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
/// An engine can be created and used on any thread, and moved between threads. Graphs are ordered
/// only with work on their own stream of the device, and can only be recorded on the stream of the
/// model's weights. All of an engine's work is therefore on that stream: the stream of the thread
/// that created the model. While one engine records a graph, the others wait. CubeCL cannot
/// exclude other work that the program launches on the stream during a recording, and would record
/// it. Leave the device to the engines until the first steps, or a [`warm_up`](Self::warm_up) for
/// one sequence, are done.
pub struct Engine {
    /// The stream of the model's weights.
    stream: StreamId,
    scheduler: Scheduler<ModelExecutors>,
}

/// Checks that an engine can be moved to the thread that uses it.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Engine>();
};

impl Engine {
    /// Creates an engine without sequences, with room for up to `slots` sequences of the model's
    /// window each.
    ///
    /// # Errors
    /// [`ModelError::TooManySequences`] outside 1 to [`MAX_SEQUENCES`],
    /// [`ModelError::CacheTooLarge`] if a KV cache of `slots` sequences does not fit the device,
    /// before anything is allocated, and [`ModelError::Parallel`] if a device of a split model is
    /// still at work after a failure.
    pub fn new(model: Arc<Model>, slots: usize) -> Result<Self, ModelError> {
        check_slots(slots)?;
        let (stream, window, vocab_size) =
            (model.stream(), model.max_len(), model.config().vocab_size);
        let executor = stream.executes(|| ModelExecutors::new(model, slots, None))?;
        Ok(Self {
            stream,
            scheduler: Scheduler::new(executor, slots, window, vocab_size),
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
    /// Panics if the engine has sequences.
    pub fn warm_up(&mut self, prompt_tokens: usize) -> Duration {
        assert!(self.sequences() == 0, "the engine has sequences");
        self.stream
            .executes(|| self.scheduler.executor_mut().warm_up(prompt_tokens))
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
            .executes(|| self.scheduler.executor_mut().compile_ahead(prompt_tokens))
    }

    /// Sets the largest number of prompt tokens that a step reads while other sequences are
    /// running. The running sequences wait for these tokens: fewer tokens mean a shorter wait, more
    /// are read faster. The default is the largest possible number, which is also read while no
    /// sequence is running: 1024 if attention runs on tensor cores, otherwise 512.
    pub fn set_prefill_chunk(&mut self, tokens: usize) {
        self.scheduler.executor_mut().set_chunk(tokens);
    }

    /// Queues a request, whose prompt the next steps read, and returns its sequence's slot at once.
    ///
    /// # Errors
    /// [`ModelError::EmptyPrompt`], [`ModelError::PromptTooLong`], [`ModelError::Token`] for a
    /// token outside the vocabulary, [`ModelError::Sampling`] for options outside their range and
    /// empty bad words, [`ModelError::TooManySequences`] if every slot is in use.
    pub fn add_request(
        &mut self,
        prompt: &[u32],
        options: &RequestParams,
    ) -> Result<usize, ModelError> {
        self.stream
            .executes(|| self.scheduler.add_request(prompt, options))
    }

    /// Removes a sequence, whether or not it has ended or its prompt was read.
    pub fn abort(&mut self, slot: usize) {
        self.scheduler.abort(slot);
    }

    /// Returns the number of sequences that were added and have neither ended nor been aborted.
    pub fn sequences(&self) -> usize {
        self.scheduler.sequences()
    }

    /// Returns the number of sequences whose prompts are not yet fully read.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Returns true if steps are replayed as graphs of the device; false before the first step.
    pub fn is_captured(&self) -> bool {
        self.scheduler.executor().is_captured()
    }

    /// Reads queued prompts, and returns one token for each sequence whose prompt is read, in the
    /// order of their slots. The result is empty if there is no sequence.
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
    /// Returns an error if the device fails. A sequence whose logits are broken ends with its error
    /// in [`StepOutput::end`]; the other sequences continue. After a failure of a device of a split
    /// model every step of the engine fails, and a new engine can be created.
    pub fn step(&mut self) -> Result<Vec<StepOutput>, ModelError> {
        self.stream.executes(|| self.scheduler.step())
    }
}

/// Checks the number of sequences that an engine has room for.
fn check_slots(slots: usize) -> Result<(), ModelError> {
    match slots {
        1..=MAX_SEQUENCES => Ok(()),
        _ => Err(ModelError::TooManySequences {
            asked: slots,
            max: MAX_SEQUENCES,
        }),
    }
}

/// Checks that a prompt has tokens, at most `max`, all of them in the vocabulary. Returns the last
/// token.
fn check_prompt(prompt: &[u32], max: usize, vocab_size: usize) -> Result<u32, ModelError> {
    let Some(&last) = prompt.last() else {
        return Err(ModelError::EmptyPrompt);
    };
    if prompt.len() > max {
        return Err(ModelError::PromptTooLong {
            tokens: prompt.len(),
            max,
        });
    }
    let unknown = |&(_, &token): &(usize, &u32)| token as usize >= vocab_size;
    match prompt.iter().enumerate().find(unknown) {
        Some((position, &token)) => Err(ModelError::Token {
            token,
            position,
            vocab_size,
        }),
        None => Ok(last),
    }
}
