//! The interface to what computes the steps.

use super::params::SamplingParams;
use crate::scheduler::{RequestId, Step};
pub use marlin_lm::TokenLogprobs;

/// Computes the steps of a model over the pages of a KV cache.
///
/// The server calls all methods on its own thread. Steps are finished in the order in which they
/// were started, and at most two of them are in flight.
pub trait Executor: Send + 'static {
    /// A step that was started and is not finished.
    type InFlight;

    /// Returns what the executor can compute. It is called once, before all others.
    fn capabilities(&self) -> Capabilities;

    /// Returns true if a step may be started before the one before it is finished, so that the
    /// host's work is hidden behind the device's. It is called once.
    fn runs_ahead(&self) -> bool;

    /// Does a part of the work that later steps would wait for, such as recording passes. It is
    /// called while there is no request. Returns false if nothing is left.
    fn prepare(&mut self) -> bool {
        false
    }

    /// Takes a sequence in, before the first row of it. A sequence that was pre-empted was removed,
    /// and is added again with the tokens that were generated so far.
    ///
    /// # Errors
    /// If the sequence cannot be computed. The request fails, and no step has a row of it.
    fn add(&mut self, sequence: NewSequence<'_>) -> Result<(), ExecutorError>;

    /// Removes a sequence that ended or was pre-empted. What rows of it in flight give is ignored.
    fn remove(&mut self, request: RequestId);

    /// Starts a step, without waiting for the device.
    ///
    /// A [decode row](crate::DecodeRow) without a token takes, on the device, the one that the step
    /// before sampled for the same request. If `masked` is true, some rows may only sample certain
    /// tokens, which [`mask`](Self::mask) is about to give: no row of the step is sampled before.
    ///
    /// # Errors
    /// If the step could not be started. All requests with a row in it fail, and no other step is
    /// started before that.
    fn start(&mut self, step: &Step, masked: bool) -> Result<Self::InFlight, ExecutorError>;

    /// Gives the tokens that rows of a step may sample, if it was started with `masked`, and lets
    /// the step sample. All steps before it are finished. It is called once for each such step,
    /// with no masks if all masked requests have ended.
    ///
    /// # Errors
    /// If the step could not go on. All requests with a row in it fail, it is not finished, and no
    /// other step is started before that.
    fn mask(
        &mut self,
        in_flight: &mut Self::InFlight,
        step: &Step,
        masks: Vec<TokenMask>,
    ) -> Result<(), ExecutorError>;

    /// Waits for a step. Returns one entry for each prefill chunk, and then one for each decode
    /// row.
    ///
    /// # Errors
    /// If the step could not be computed. All requests with a row in it fail. The step after it may
    /// be in flight; what its rows of these requests give is ignored.
    fn finish(&mut self, step: Self::InFlight) -> Result<Vec<RowOutput>, ExecutorError>;
}

/// What an executor can compute. Requests for more are refused when they are submitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// The number of tokens of the model's vocabulary.
    pub vocab_size: usize,
    /// The most tokens of a sequence, those of the prompt and the generated ones together.
    pub max_len: usize,
    /// True if rows can have a [presence](SamplingParams::presence_penalty) and a
    /// [frequency](SamplingParams::frequency_penalty) penalty.
    pub penalties: bool,
    /// True if rows can have a [logit bias](SamplingParams::logit_bias).
    pub logit_bias: bool,
    /// True if rows can have [masks](Executor::mask), which requests with a grammar need.
    pub masks: bool,
    /// The most alternatives of a token whose [log probabilities](SamplingParams::logprobs) can be
    /// returned; `None` if not even that of the token itself can.
    pub max_logprobs: Option<usize>,
}

/// A sequence that is about to get its first row, for the first time or after a pre-emption.
#[derive(Debug, Clone, Copy)]
pub struct NewSequence<'a> {
    /// The request.
    pub request: RequestId,
    /// The token IDs of the prompt, then those that were generated before a pre-emption.
    pub tokens: &'a [u32],
    /// The number of tokens in the prompt.
    pub prompt: usize,
    /// How tokens are chosen.
    pub params: &'a SamplingParams,
    /// The seed of the random choices: that of the parameters, or a random one. It stays the same
    /// after a pre-emption.
    pub seed: u64,
    /// The tokens that end the sequence, which are not chosen before there are
    /// [`min_tokens`](SamplingParams::min_tokens).
    pub stop_tokens: &'a [u32],
}

/// The tokens that a row may sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    /// The index of the row: the prefill chunks of the step are counted first, then its decode
    /// rows.
    pub row: usize,
    /// A bit for each token of the vocabulary: token `t` is allowed if bit `t % 32` of word
    /// `t / 32` is set.
    pub allowed: Vec<u32>,
}

/// The result of a prefill chunk or of a decode row.
#[derive(Debug, Clone, PartialEq)]
pub enum RowOutput {
    /// The keys and values were computed: of a chunk that does not end its prompt.
    Computed,
    /// A token was sampled: of a decode row, or of a chunk that ends its prompt.
    Token {
        /// The token ID.
        token: u32,
        /// The log probabilities, if the request asks for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// The row was not computed, for this reason. The request fails.
    Failed(String),
}

/// A failure of an executor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// A failure of one call: later ones may succeed.
    #[error("{0}")]
    Call(String),
    /// The device is lost: no later call can succeed. The server fails all its requests and ends.
    #[error("the device is lost: {0}")]
    Lost(String),
}
