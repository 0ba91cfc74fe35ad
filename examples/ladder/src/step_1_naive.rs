//! Step 1: one thread per output, and one weight at a time.
//!
//! **The step.** The kernel is the definition of the matmul, as a loop. Every thread iterates over
//! one column of the weight. It unpacks each 4-bit value, converts it to float, scales it and
//! multiplies it by one activation. Threads of a warp have neighbouring columns, so that their
//! words are contiguous; otherwise the kernel would be several times slower.
//!
//! **What bounds it.** With one row of activations, the bound is latency: there are only N threads,
//! each of which waits for one load after the other. With more rows, the bounds are instructions
//! and the second-level cache, because every row unpacks every weight again.
//!
//! **In the profile.** Few warps per multiprocessor are active, they stall on "long scoreboard",
//! and the memory runs far below its rate.

use crate::{Args, LadderError};
use cubecl::client::Client;
use cubecl::prelude::*;
use half::f16;
use marlin_kernels::QuantProblem;

/// The number of threads of a block on a GPU.
pub(crate) const THREADS: u32 = 256;

// ANCHOR: kernel
/// Computes out[m, n] = sum over k of x[m, k] * (q[k, n] - 8) * s[k / 128, n], with `columns` words
/// in a row of the plain layout.
#[cube(launch_unchecked)]
pub(crate) fn naive(
    x: &[f16],
    words: &[u32],
    scales: &[f16],
    out: &mut [f16],
    m: usize,
    n: usize,
    k: usize,
    columns: usize,
) {
    let row = ABSOLUTE_POS / n;
    let column = ABSOLUTE_POS % n;
    if row >= m {
        terminate!();
    }
    let mut sum = 0.0f32;
    for i in 0..k {
        let word = words[i / 8 * columns + column];
        let q = (word >> (i as u32 % 8 * 4)) & 15u32;
        let weight = (f32::cast_from(q) - 8.0) * f32::cast_from(scales[i / 128 * n + column]);
        sum += f32::cast_from(x[row * k + i]) * weight;
    }
    out[ABSOLUTE_POS] = f16::cast_from(sum);
}
// ANCHOR_END: kernel

pub(crate) fn launch(
    client: &Client,
    problem: &QuantProblem,
    args: Args,
) -> Result<(), LadderError> {
    let (m, n, k) = (problem.m, problem.n(), problem.k());
    let count = CubeCount::new_1d((m * n).div_ceil(THREADS as usize) as u32);
    let dim = CubeDim::new_1d(THREADS);
    let columns = n.next_multiple_of(8);
    // SAFETY: the lengths of all buffers were checked, and threads past the last output stop.
    unsafe {
        naive::launch_unchecked(
            client,
            count,
            dim,
            args.x,
            args.words,
            args.scales,
            args.out,
            m,
            n,
            k,
            columns,
        )
    };
    Ok(())
}
