//! Weights of 4 and 8 bits, integers and floats, on the CPU, directly from the packed weight, for Burn's Flex backend, which does
//! not use CubeCL.
//!
//! Supports and refuses the same problems as [`crate::matmul::portable`]. Activations are passed
//! and computed in f32, whatever the dtype of the tensors; scales are read in their stored dtype.
//!
//! | file | holds |
//! |---|---|
//! | `few` | up to eight rows: the weight is streamed through registers |
//! | `many` | more rows: panels of the weight are unpacked into the first-level cache |
//! | `unpack` | the dequantised weight |
//! | [`lm_head`] | few rows with a float table |
//! | [`simd`] | the vector instructions of these loops, and a version in plain Rust |
//! | [`threads`] | the distribution of columns over all cores |
//! | `pool`, `cores` | the threads, and the cores that they run on |

mod cores;
mod few;
mod float;
pub mod lm_head;
mod many;
mod pool;
#[allow(
    missing_docs,
    reason = "each function is named as the operation that it is"
)]
pub mod simd;
pub mod threads;
mod unpack;
mod weight;

#[cfg(test)]
mod tests;

use crate::problem::expect_length;
use crate::{Kernel, KernelError, QuantProblem};
pub use float::HostFloat;
use weight::Reader;
pub use weight::{Floats, FloatsMut, HostWeight};

/// Multiplies activations [M, K] with a packed weight and adds a bias `[N]`; returns [M, N].
///
/// # Errors
/// Returns an error for a buffer of the wrong length, or an operand that does not fit the format.
pub fn matmul(
    problem: &QuantProblem,
    x: &[f32],
    weight: HostWeight<'_>,
    bias: Option<&[f32]>,
) -> Result<Vec<f32>, KernelError> {
    let (m, n, k, spec) = (problem.m, problem.n(), problem.k(), problem.spec());
    Kernel::Host.trace(problem);
    weight.check(problem)?;
    expect_length(problem, "activations", m * k, x.len())?;
    if let Some(bias) = bias {
        expect_length(problem, "bias", n, bias.len())?;
    }
    let mut out = match bias {
        Some(bias) => bias.repeat(m),
        None => vec![0.0; m * n],
    };
    let reader = Reader::new(problem, weight);
    if m == 0 {
        return Ok(out);
    }
    if m <= few::MAX_ROWS {
        let x = few::Activations::new(x, k, weight.row_permutation, reader.chunk, spec.value);
        few::multiply(&reader, &x, &mut out, n);
    } else {
        let x = many::Activations::new(x, k, weight.row_permutation);
        many::multiply(&reader, &x, &mut out, n);
    }
    Ok(out)
}

/// Writes the float weight [K, N] to `out`, in natural row order. `m` of the problem is not used.
///
/// Like [`matmul`], this is not a generic function: the loops of a generic function would be
/// compiled in the calling crate, at that crate's optimisation level.
///
/// # Errors
/// The same as [`matmul`].
pub fn dequantize(
    problem: &QuantProblem,
    weight: HostWeight<'_>,
    out: FloatsMut<'_>,
) -> Result<(), KernelError> {
    let (n, k) = (problem.n(), problem.k());
    weight.check(problem)?;
    expect_length(problem, "weight", k * n, out.len())?;
    let (reader, rows) = (Reader::new(problem, weight), weight.row_permutation);
    match out {
        FloatsMut::F32(out) => unpack::dequantize(&reader, rows, out, n),
        FloatsMut::F16(out) => unpack::dequantize(&reader, rows, out, n),
        FloatsMut::BF16(out) => unpack::dequantize(&reader, rows, out, n),
    }
    Ok(())
}
