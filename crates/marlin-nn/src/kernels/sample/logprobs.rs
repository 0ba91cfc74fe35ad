//! The kernel that computes log probabilities of the chosen token and of the most likely tokens.

use super::floats::SharedValues;
use super::kernel::{largest, ranked};
use super::launch::units;
use super::noise::{key, value};
use super::{LOGPROB_WORDS, MAX_LOGPROBS};
use crate::kernels::shape::RowsShape;
use crate::kernels::{SequenceState, SequenceStatus};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::problem::expect_length;
use marlin_kernels::{KernelError, Runtime, Target};

/// The number of units of a cube, if the device supports as many.
const UNITS: u32 = 512;

/// The operands of [`logprobs`].
pub struct LogprobArgs {
    /// The logits [rows, vocab], contiguous.
    pub logits: BufferArg,
    /// i32 [rows, [`SequenceState::WORDS`]]: the rows after [`sample`](super::sample), with the
    /// chosen tokens.
    pub state: BufferArg,
    /// The output, i32 [rows, [`LOGPROB_WORDS`]]. Rows that ask for no log probabilities, or have
    /// no chosen token, are not written.
    pub out: BufferArg,
}

/// Computes log(softmax(logits)) in f32 of the chosen token of each row, and of as many of its most
/// likely tokens as the row asks for. The logits are those of the model: penalties, biases,
/// suppressed tokens and temperature do not count. `shape.features` is the size of the vocabulary.
///
/// # Errors
/// Returns an error if a buffer has the wrong length, or the device does not support the dtype.
pub fn logprobs(client: &Client, shape: &RowsShape, args: LogprobArgs) -> Result<(), KernelError> {
    shape.dtype.expect_on(client)?;
    for (operand, expected, found) in [
        ("logits", shape.rows * shape.features, &args.logits),
        ("state", shape.rows * SequenceState::WORDS, &args.state),
        ("log probabilities", shape.rows * LOGPROB_WORDS, &args.out),
    ] {
        expect_length(shape, operand, expected, found.len())?;
    }
    if shape.rows * shape.features == 0 {
        return Ok(());
    }
    let units = units(client, UNITS);
    let runtime = Target::of(client).runtime;
    row_logprobs::launch(
        client,
        CubeCount::new_1d(shape.rows as u32),
        CubeDim::new_1d(units),
        args.logits,
        args.state,
        args.out,
        shape.features as u32,
        units as usize,
        !matches!(runtime, Runtime::Cuda | Runtime::Cpu),
        shape.dtype.elem(),
    );
    Ok(())
}

/// Writes the log probabilities of one row per cube.
///
/// The most likely tokens are found one after the other: each search finds the largest
/// [rank](ranked) below that of the token before. A search reads all logits of the row, from the L2
/// cache.
#[cube(launch)]
fn row_logprobs<F: Float>(
    logits: &[F],
    state: &[i32],
    out: &mut [u32],
    vocab: u32,
    #[comptime] units: usize,
    #[comptime] is_shader: bool,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS_X as usize;
    let words = row * comptime!(SequenceState::WORDS);
    let asked = u32::reinterpret(state[words + comptime!(SequenceState::LOGPROBS)]);
    let position = state[words + comptime!(SequenceState::POSITION)];
    let has_token = position >= 0 || position == comptime!(SequenceStatus::WINDOW_FULL);
    if asked == 0 || !has_token {
        terminate!();
    }
    let first = row * vocab as usize;
    let mut shared = SharedValues::new(units, is_shader);
    // On the CPU, cubes share this memory, and a unit starts the next cube while other units still
    // process the previous cube.
    sync_cube();

    let best = search::<F>(logits, first, vocab, u64::MAX.runtime(), &mut shared, units);
    let most = value(u32::cast_from(best >> 32));
    let mut sum = 0.0f32.runtime();
    let mut token = UNIT_POS_X;
    while token < vocab {
        sum += (f32::cast_from(logits[first + token as usize]) - most).exp();
        token += comptime!(units as u32);
    }
    shared.set(UNIT_POS_X as usize, u64::cast_from(u32::reinterpret(sum)));
    sync_cube();
    let mut half = comptime!(units as u32 / 2).runtime();
    while half > 0 {
        if UNIT_POS_X < half {
            let other = shared.get((UNIT_POS_X + half) as usize);
            sum += f32::reinterpret(u32::cast_from(other));
            shared.set(UNIT_POS_X as usize, u64::cast_from(u32::reinterpret(sum)));
        }
        sync_cube();
        half /= 2;
    }
    let sum = f32::reinterpret(u32::cast_from(shared.get(0usize))).ln();
    sync_cube();

    let record = row * LOGPROB_WORDS;
    if UNIT_POS_X == 0 {
        let token = u32::reinterpret(state[words + comptime!(SequenceState::TOKEN)]);
        let logit = f32::cast_from(logits[first + token as usize]);
        out[record] = u32::reinterpret(logit - most - sum);
    }
    let mut last = best;
    let count = min(min(asked - 1, vocab), comptime!(MAX_LOGPROBS as u32));
    for i in 0..count {
        if i > 0 {
            last = search::<F>(logits, first, vocab, last, &mut shared, units);
        }
        if UNIT_POS_X == 0 {
            let token = !u32::cast_from(last);
            let logit = f32::cast_from(logits[first + token as usize]);
            let pair = record + 1 + 2 * i as usize;
            out[pair] = token;
            out[pair + 1] = u32::reinterpret(logit - most - sum);
        }
    }
}

/// Returns the largest rank below `last` of the tokens of a row.
#[cube]
fn search<F: Float>(
    logits: &[F],
    first: usize,
    vocab: u32,
    last: u64,
    shared: &mut SharedValues,
    #[comptime] units: usize,
) -> u64 {
    let mut best = 0u64.runtime();
    let mut token = UNIT_POS_X;
    while token < vocab {
        let logit = f32::cast_from(logits[first + token as usize]);
        let rank = ranked(key(logit), token);
        if rank < last {
            best = max(best, rank);
        }
        token += comptime!(units as u32);
    }
    largest(best, shared, units)
}
