//! Sampling: the next token of every row is chosen on the device from the logits of the lm_head,
//! and written to the row's state in place.
//!
//! The steps are, in the order of Hugging Face's `generate`: repetition penalty, biases (logit
//! bias, presence and frequency penalties), suppressed tokens, temperature, top-k, top-p, min-p,
//! and a random choice among the remaining tokens. Of equal logits, the lower token counts as the
//! more likely one. The logits of suppressed tokens are minus infinity.
//!
//! The random choice is the Gumbel-max trick: it takes the remaining token with the largest logit /
//! temperature + noise. The noise of a token is -ln(-ln(u)), and u comes from Philox4x32-10 (Salmon
//! et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the row's seed as its key and
//! (token / 4, position) as its counter. A seed, a position and logits therefore determine the
//! token, whatever the row and the batch, and the noise of a token does not depend on other tokens.
//! Arithmetic is in f32, with operations that round the same everywhere (`floats.rs`), and sums are
//! of integers, so the kernels and [`sample_host`] choose the same token.
//!
//! | launch | one cube processes | result |
//! |---|---|---|
//! | `score` | a chunk of 1024 tokens of a row | the record of the chunk |
//! | `choose` | a row | the next token and the new state of the row |
//! | `row_logprobs` | a row, if it asks for them | log probabilities of the chosen token and of the most likely tokens |
//!
//! A row fails ([`SequenceStatus::Failed`](super::SequenceStatus::Failed)) where the logit of a
//! token that is not suppressed is NaN or plus infinity, and where all are minus infinity; the
//! others go on. Refused are vocabularies past 2^18 tokens, and devices without integers of 64 bits
//! or with too little shared memory for the vocabulary ([`check_device`]).

#[cfg(feature = "cubecl-runtime")]
mod bins;
#[cfg(feature = "cubecl-runtime")]
mod filter;
#[cfg(feature = "cubecl-runtime")]
mod floats;
#[cfg(feature = "cubecl-runtime")]
mod kernel;
#[cfg(feature = "cubecl-runtime")]
mod launch;
#[cfg(feature = "cubecl-runtime")]
mod logits;
#[cfg(feature = "cubecl-runtime")]
mod logprobs;
#[cfg(feature = "cubecl-runtime")]
mod noise;
mod reference;
mod token_table;

#[cfg(feature = "cubecl-runtime")]
pub use launch::{SampleArgs, SampleShape, check_device, sample, workspace_words};
#[cfg(feature = "cubecl-runtime")]
pub use logprobs::{LogprobArgs, logprobs};
pub use reference::{logprobs_host, sample_host};
pub use token_table::{SlotTokens, TokenTable, bitmap};

/// The largest number of most likely tokens whose log probabilities are computed, which is that of
/// OpenAI's API.
pub const MAX_LOGPROBS: usize = 20;
/// The number of words of a row's log probabilities: the bits of the chosen token's, then [token,
/// bits] of each of the most likely tokens.
pub const LOGPROB_WORDS: usize = 1 + 2 * MAX_LOGPROBS;
/// The number of tokens of a block: those of one word of a bitmap of tokens.
const BLOCK: usize = 32;
/// The number of tokens of a chunk.
const CHUNK: usize = 1024;
/// The number of blocks of a chunk.
const CHUNK_BLOCKS: usize = CHUNK / BLOCK;
/// The number of words of the record of a chunk, which `score` writes for `choose`: [key, token] of
/// the best token, and a key for each block.
const RECORD: usize = 2 + CHUNK_BLOCKS;
/// The number of bits that hold a token.
const TOKEN_BITS: usize = 18;
/// The number of blocks of the largest vocabulary.
const MAX_BLOCKS: usize = (1 << TOKEN_BITS) / BLOCK;
/// The temperature below which the most likely token is chosen.
const MIN_TEMPERATURE: f32 = 1e-5;
/// The min-p below which all tokens are kept: the least normal number.
const MIN_MIN_P: f32 = f32::MIN_POSITIVE;
/// The key of NaN and of plus infinity, which is greater than that of every finite value.
const BROKEN: u32 = u32::MAX;
/// The base-2 logarithm of the mass of the most likely token. The mass of a token whose probability
/// is below 2^-40 of the most likely token's is 0.
const MASS_BITS: i32 = 40;
