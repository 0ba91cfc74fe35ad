//! The next token of every row, chosen on the device from the head's logits; the row's state goes
//! on to it in place.
//!
//! In this order, as Hugging Face's `generate` does: repetition penalty, suppressed tokens,
//! temperature, top-k, top-p, min-p, and a random choice among the tokens that are left. Of equal
//! logits the lower token is the more likely one. The logits of suppressed tokens are minus
//! infinity.
//!
//! The random choice is the Gumbel-max trick: of the tokens left, the one with the largest logit /
//! temperature + noise, where the noise of a token is -ln(-ln(u)) and u comes from Philox4x32-10
//! (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the row's seed as its
//! key and (token / 4, position) as its counter. So a seed, a position and logits give one token,
//! in whatever row and batch, and a token's noise needs no other token. Everything is in f32 from
//! operations that round the same everywhere (`floats.rs`), and sums are of integers, so the
//! kernels and [`sample_host`] choose the same token.
//!
//! | launch | a cube | does |
//! |---|---|---|
//! | `score` | a chunk of 1024 tokens of a row | the chunk's best token: by its score, or by its logit where top-k, top-p or min-p are to come, and then the best logit of each block of 32 |
//! | `choose` | a row | the best of all chunks; or top-k, top-p, min-p and the choice among what they leave; the row's new state |
//!
//! A row fails ([`RowState::Failed`](super::RowState::Failed)) where the logit of a token that is
//! not suppressed is NaN or plus infinity, and where all are minus infinity; the others go on.
//! Refused are vocabularies past 2^18 tokens, and devices without integers of 64 bits or with too
//! little shared memory for the vocabulary ([`check_device`]).

mod bins;
mod filter;
mod floats;
mod kernel;
mod launch;
mod logits;
mod noise;
mod reference;

pub use launch::{SampleArgs, SampleShape, check_device, sample, workspace_words};
pub use reference::{bitmap, sample_host};

/// Bitmaps of tokens that a slot has: of those that occurred in its sequence, then of those that
/// are suppressed.
pub const BITMAPS: usize = 2;
/// Tokens of a block: those of a word of the bitmap of tokens that occurred.
const BLOCK: usize = 32;
/// Tokens of a chunk.
const CHUNK: usize = 1024;
/// Blocks of a chunk.
const CHUNK_BLOCKS: usize = CHUNK / BLOCK;
/// Words of what `score` leaves of a chunk for `choose`: [key, token] of the best token, and a key
/// for each block.
const RECORD: usize = 2 + CHUNK_BLOCKS;
/// Bits that hold a token.
const TOKEN_BITS: usize = 18;
/// Blocks of the largest vocabulary.
const MAX_BLOCKS: usize = (1 << TOKEN_BITS) / BLOCK;
/// Below this temperature the most likely token is chosen.
const MIN_TEMPERATURE: f32 = 1e-5;
/// Below this min-p, the least normal number, all tokens count.
const MIN_MIN_P: f32 = f32::MIN_POSITIVE;
/// A key past that of every finite value: of NaN and of plus infinity.
const BROKEN: u32 = u32::MAX;
/// The mass of the most likely token is 2 to this; that of a token below 2^-40 of it is 0.
const MASS_BITS: i32 = 40;
