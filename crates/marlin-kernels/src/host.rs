//! W4A16 and W8A16 on the CPU in plain Rust, straight from the packed weight: for decode on Burn's Flex backend, which runs no CubeCL.
//!
//! Supported and refused: as [`crate::portable`]. Activations and scales come as f32, whatever the tensors hold.
//!
//! Columns are split into strips that threads take in turn. A strip is unpacked and scaled a few rows at a time into a buffer that stays in
//! the first-level cache, and multiplied from there with every row of activations.

use crate::problem::WeightLengths;
use crate::{KernelError, Problem};
use marlin_format::layout::PlainLayout;
use rayon::prelude::*;

/// Columns a thread works on at a time; with [`DEPTH`] rows of f32 they fill 16 KiB, half a first-level cache.
const STRIP: usize = 128;
/// Rows of K unpacked at a time: a divisor of every group size.
const DEPTH: usize = 32;

/// A weight in host memory, in the plain layout.
#[derive(Debug, Clone, Copy)]
pub struct HostWeight<'a> {
    /// [K/8 up (of 8 bits K/4 up), N up to a multiple of 8]: [`PlainLayout`].
    pub words: &'a [u32],
    /// [G, N].
    pub scales: &'a [f32],
    /// [G, N/8 up], eight zero points a word along N (of 8 bits [G, N/4 up], four); absent where symmetric.
    pub zero_points: Option<&'a [u32]>,
    /// `[K]`: the natural row of each stored row; absent where rows are in order.
    pub row_permutation: Option<&'a [u32]>,
}

impl HostWeight<'_> {
    fn check(&self, problem: &Problem) -> Result<(), KernelError> {
        problem.expect_weight(WeightLengths {
            words: self.words.len(),
            scales: self.scales.len(),
            zero_points: self.zero_points.map(<[u32]>::len),
            row_permutation: self.row_permutation.map(<[u32]>::len),
        })
    }
}

/// Multiplies activations [M, K] with a packed weight and adds a bias `[N]`; returns [M, N].
///
/// # Errors
/// A buffer of the wrong length, or an operand that does not fit the format.
pub fn matmul(problem: &Problem, x: &[f32], weight: HostWeight<'_>, bias: Option<&[f32]>) -> Result<Vec<f32>, KernelError> {
    let Problem { m, n, k, .. } = *problem;
    weight.check(problem)?;
    problem.expect_length("activations", m * k, x.len())?;
    if let Some(bias) = bias {
        problem.expect_length("bias", n, bias.len())?;
    }

    let gathered = weight.row_permutation.map(|rows| gather(x, rows, m, k));
    let x = gathered.as_deref().unwrap_or(x);

    let strips: Vec<Vec<f32>> =
        (0..n.div_ceil(STRIP)).into_par_iter().map(|strip| multiply_strip(problem, x, &weight, strip * STRIP)).collect();
    let mut out = vec![0.0; m * n];
    for (strip, values) in strips.iter().enumerate() {
        let width = values.len() / m.max(1);
        for (row, values) in values.chunks_exact(width.max(1)).enumerate() {
            let start = row * n + strip * STRIP;
            out[start..start + width].copy_from_slice(values);
        }
    }
    if let Some(bias) = bias {
        for row in out.chunks_exact_mut(n) {
            row.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
        }
    }
    Ok(out)
}

/// The float weight [K, N] in natural row order. `m` of the problem is not used.
///
/// # Errors
/// As [`matmul`].
pub fn dequantize(problem: &Problem, weight: HostWeight<'_>) -> Result<Vec<f32>, KernelError> {
    let Problem { n, k, .. } = *problem;
    weight.check(problem)?;
    let blocks: Vec<Vec<f32>> =
        (0..k.div_ceil(DEPTH)).into_par_iter().map(|block| dequantize_rows(problem, &weight, block * DEPTH)).collect();
    let stored = blocks.concat();
    let Some(rows) = weight.row_permutation else { return Ok(stored) };
    let mut natural = vec![0.0; k * n];
    for (values, &row) in stored.chunks_exact(n).zip(rows) {
        natural[row as usize * n..][..n].copy_from_slice(values);
    }
    Ok(natural)
}

/// Up to [`DEPTH`] rows of the weight in stored order, [depth, N].
fn dequantize_rows(problem: &Problem, weight: &HostWeight<'_>, start: usize) -> Vec<f32> {
    let Problem { n, k, spec, .. } = *problem;
    let depth = DEPTH.min(k - start);
    let mut out = vec![0.0; depth * n];
    let mut unpacked = [[0.0f32; STRIP]; DEPTH];
    for first in (0..n).step_by(STRIP) {
        let width = STRIP.min(n - first);
        unpack(problem, weight, start, depth, first, start / spec.group.rows(k), &mut unpacked);
        for (row, values) in unpacked[..depth].iter().enumerate() {
            out[row * n + first..][..width].copy_from_slice(&values[..width]);
        }
    }
    out
}

/// The columns of `x` [M, K] in the order of the stored rows.
fn gather(x: &[f32], rows: &[u32], m: usize, k: usize) -> Vec<f32> {
    (0..m).flat_map(|row| rows.iter().map(move |&natural| x[row * k + natural as usize])).collect()
}

/// One strip of the output, [M, width].
fn multiply_strip(problem: &Problem, x: &[f32], weight: &HostWeight<'_>, first: usize) -> Vec<f32> {
    let Problem { m, n, k, spec, .. } = *problem;
    let width = STRIP.min(n - first);
    let mut out = vec![0.0; m * width];
    let mut unpacked = [[0.0f32; STRIP]; DEPTH];
    for start in (0..k).step_by(DEPTH) {
        let depth = DEPTH.min(k - start);
        let group = start / spec.group.rows(k);
        unpack(problem, weight, start, depth, first, group, &mut unpacked);
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            let x = &x[row * k + start..row * k + start + depth];
            for (&x, weights) in x.iter().zip(&unpacked) {
                for (out, weight) in out.iter_mut().zip(weights) {
                    *out += x * weight;
                }
            }
        }
    }
    out
}

/// Dequantises `depth` rows of a strip, all of one group.
fn unpack(
    problem: &Problem,
    weight: &HostWeight<'_>,
    start: usize,
    depth: usize,
    first: usize,
    group: usize,
    unpacked: &mut [[f32; STRIP]; DEPTH],
) {
    let Problem { n, k, spec, .. } = *problem;
    let (width, layout) = (STRIP.min(n - first), PlainLayout::new(k, n, spec.bits));
    let (per_word, max) = (spec.bits.per_word(), u32::from(spec.bits.max()));
    let scales = &weight.scales[group * n + first..][..width];
    let mut zeros = [f32::from(spec.bits.midpoint()); STRIP];
    if let Some(words) = weight.zero_points {
        let words = &words[group * n.div_ceil(per_word)..];
        for (i, zero) in zeros[..width].iter_mut().enumerate() {
            let column = first + i;
            *zero = ((words[column / per_word] >> (spec.bits.count() * (column % per_word))) & max) as f32;
        }
    }
    for (i, row) in unpacked[..depth].iter_mut().enumerate() {
        let index = layout.index(start + i, first);
        let (words, shift) = (&weight.words[index.word..][..width], index.shift());
        for (((value, word), scale), zero) in row.iter_mut().zip(words).zip(scales).zip(&zeros) {
            *value = (((word >> shift) & max) as f32 - zero) * scale;
        }
    }
}
