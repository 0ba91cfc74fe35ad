//! The kernel that computes the log-likelihoods of tokens from the logits of the positions before
//! them, with one cube per row.

use super::shape::{RowsShape, most_units, shared_memory};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::KernelError;
use marlin_kernels::problem::expect_length;

/// The maximum number of units of a cube.
const MAX_UNITS: usize = 256;

/// The operands of [`log_likelihoods`].
pub struct LikelihoodArgs {
    /// Logits [rows, vocab], contiguous.
    pub logits: BufferArg,
    /// The token of each row, i32 `[rows]`; negative if the row has no token.
    pub tokens: BufferArg,
    /// The output, f32 `[rows]`: 0 for rows without a token, and NaN for tokens outside the
    /// vocabulary.
    pub out: BufferArg,
}

/// Computes log(softmax(logits)\[token\]) of each row, in f32. `shape.features` is the size of the
/// vocabulary.
///
/// # Errors
/// Returns an error if a buffer has the wrong length, or the device does not support the dtype.
pub fn log_likelihoods(
    client: &Client,
    shape: &RowsShape,
    args: LikelihoodArgs,
) -> Result<(), KernelError> {
    shape.dtype.expect_on(client)?;
    for (operand, expected, found) in [
        ("logits", shape.rows * shape.features, &args.logits),
        ("tokens", shape.rows, &args.tokens),
        ("output", shape.rows, &args.out),
    ] {
        expect_length(shape, operand, expected, found.len())?;
    }
    if shape.rows * shape.features == 0 {
        return Ok(());
    }
    let units = 1
        << MAX_UNITS
            .min(most_units(client))
            .min(shared_memory(client) / size_of::<f32>())
            .max(1)
            .ilog2();
    let (count, dim) = (
        CubeCount::Static(shape.rows as u32, 1, 1),
        CubeDim::new_1d(units as u32),
    );
    let LikelihoodArgs {
        logits,
        tokens,
        out,
    } = args;
    log_likelihood_rows::launch(
        client,
        count,
        dim,
        logits,
        tokens,
        out,
        shape.features as u32,
        units,
        shape.dtype.elem(),
    );
    Ok(())
}

#[cube(launch)]
fn log_likelihood_rows<F: Float>(
    logits: &[F],
    tokens: &[i32],
    out: &mut [f32],
    vocab: u32,
    #[comptime] units: usize,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS;
    let first = row * vocab as usize;
    let mut shared = Shared::<[f32]>::new_slice(units);
    let mut best = f32::cast_from(logits[first]);
    let mut token = UNIT_POS;
    while token < vocab {
        best = max(best, f32::cast_from(logits[first + token as usize]));
        token += comptime!(units as u32);
    }
    best = reduced(best, &mut shared, true, units);
    let mut sum = 0.0f32.runtime();
    let mut token = UNIT_POS;
    while token < vocab {
        sum += (f32::cast_from(logits[first + token as usize]) - best).exp();
        token += comptime!(units as u32);
    }
    sum = reduced(sum, &mut shared, false, units);
    if UNIT_POS == 0 {
        let token = tokens[row];
        let mut likelihood = 0.0f32.runtime();
        if token >= 0 {
            // NaN outside of the vocabulary.
            likelihood = f32::NAN.runtime();
            if u32::cast_from(token) < vocab {
                likelihood = f32::cast_from(logits[first + token as usize]) - best - sum.ln();
            }
        }
        out[row] = likelihood;
    }
}

/// Returns the largest of one value per unit, or the sum of the values in a fixed order, in every
/// unit. `units` is a power of two.
#[cube]
fn reduced(
    value: f32,
    shared: &mut Shared<[f32]>,
    #[comptime] is_max: bool,
    #[comptime] units: usize,
) -> f32 {
    let unit = UNIT_POS as usize;
    sync_cube();
    shared[unit] = value;
    #[unroll]
    for level in 0..comptime!(units.ilog2()) {
        let half = comptime!(units >> (level + 1));
        sync_cube();
        if unit < half {
            let (a, b) = (shared[unit], shared[unit + half]);
            shared[unit] = if comptime!(is_max) { max(a, b) } else { a + b };
        }
    }
    sync_cube();
    shared[0]
}
