//! W4A16 and W8A16 on the CPU, straight from the packed weight: for Burn's Flex backend, which runs no CubeCL.
//!
//! Supported and refused: as [`crate::portable`]. Activations come as f32, whatever the tensors hold, and stay f32; scales are read as they are stored.
//!
//! | file | what |
//! |---|---|
//! | `few` | up to eight rows: the weight streams through registers |
//! | `many` | more: panels of it are unpacked into the first-level cache |
//! | `unpack` | the float weight |
//! | [`step`] | the rest of a decode step: norms, attention, the head |
//! | `simd` | the vector instructions they are made of, and plain Rust in their place |
//! | `threads` | columns over all cores |
//! | `pool`, `cores` | the threads, and where they run |

mod cores;
mod few;
mod float;
mod many;
mod pool;
mod simd;
pub mod step;
mod threads;
mod unpack;
mod weight;

#[cfg(test)]
mod step_tests;
#[cfg(test)]
mod tests;

use crate::{KernelError, Problem};
pub use float::HostFloat;
use weight::Reader;
pub use weight::{Floats, HostWeight};

/// Multiplies activations [M, K] with a packed weight and adds a bias `[N]`; returns [M, N].
///
/// # Errors
/// A buffer of the wrong length, or an operand that does not fit the format.
pub fn matmul(problem: &Problem, x: &[f32], weight: HostWeight<'_>, bias: Option<&[f32]>) -> Result<Vec<f32>, KernelError> {
    let Problem { m, n, k, spec, .. } = *problem;
    weight.check(problem)?;
    problem.expect_length("activations", m * k, x.len())?;
    if let Some(bias) = bias {
        problem.expect_length("bias", n, bias.len())?;
    }
    let mut out = match bias {
        Some(bias) => bias.repeat(m),
        None => vec![0.0; m * n],
    };
    let (reader, per_word) = (Reader::new(problem, weight), spec.bits.per_word());
    if m == 0 {
        return Ok(out);
    }
    if m <= few::MAX_ROWS {
        let x = few::Activations::new(x, k, weight.row_permutation, reader.chunk, per_word);
        few::multiply(&reader, per_word, &x, &mut out, n);
    } else {
        let x = many::Activations::new(x, k, weight.row_permutation);
        many::multiply(&reader, per_word, &x, &mut out, n);
    }
    Ok(out)
}

/// Writes the float weight [K, N] to `out`, in natural row order. `m` of the problem is not used.
///
/// # Errors
/// As [`matmul`].
pub fn dequantize<T: HostFloat>(problem: &Problem, weight: HostWeight<'_>, out: &mut [T]) -> Result<(), KernelError> {
    let Problem { n, k, spec, .. } = *problem;
    weight.check(problem)?;
    problem.expect_length("weight", k * n, out.len())?;
    unpack::dequantize(&Reader::new(problem, weight), spec.bits.per_word(), weight.row_permutation, out, n);
    Ok(())
}
