use super::config::{COLUMNS, Config, THREADS};
use super::kernel::{self, LengthsLaunch};
use super::plan::CLUSTERS;
use crate::marlin::kernel::{HIGH_NIBBLES, LOW_NIBBLES};
use crate::marlin::launch::expect_operands;
use crate::marlin::plan::format;
use crate::marlin::tiles::Format;
use crate::marlin::{WeightArgs, layout};
use crate::{KernelError, Problem};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_format::GroupSize;
use marlin_format::layout::ScaleLayout;

/// Operands of [`norm_matmul`], contiguous and from addresses that are multiples of 16.
pub struct NormMatmulArgs {
    /// [1, K].
    pub x: BufferArg,
    /// The residual stream [1, K].
    pub residual: BufferArg,
    /// The norm's weight `[K]`.
    pub norm: BufferArg,
    /// `x + residual` [1, K], rounded; written whole. Another buffer than `residual`, which other blocks still read.
    pub sum: BufferArg,
    /// The weight, without act-order.
    pub weight: WeightArgs,
    /// `[N]` in the activations' dtype.
    pub bias: Option<BufferArg>,
    /// [1, N]; written whole.
    pub out: BufferArg,
}

/// `norm(x + residual) W + bias`, the norm an RMSNorm (arXiv 1910.07467) with `epsilon` added to the mean square, on clusters of `blocks` blocks, as
/// [`plan`](super::plan) says.
///
/// # Errors
/// Not one row, a single group, act-order, a K that is no multiple of 8, blocks that are no cluster, and what [`marlin::matmul`](crate::marlin::matmul)
/// refuses.
pub fn norm_matmul(client: &Client, problem: &Problem, blocks: usize, epsilon: f32, args: NormMatmulArgs) -> Result<(), KernelError> {
    let Problem { m, n, k, spec, .. } = *problem;
    let Format { group, zero_points, bf16 } = format(problem);
    if m != 1 || !k.is_multiple_of(8) || problem.permuted || group == GroupSize::Channel || !CLUSTERS.contains(&blocks) {
        return Err(KernelError::NoGemv { problem: problem.to_string(), blocks });
    }
    let NormMatmulArgs { x, residual, norm, sum, weight, bias, out } = args;
    expect_operands(problem, &weight, bias.as_ref(), &out)?;
    for (operand, buffer) in [("activations", &x), ("residual", &residual), ("norm weight", &norm), ("sum", &sum)] {
        problem.expect_length(operand, k, buffer.len())?;
    }
    if n == 0 {
        return Ok(());
    }
    let config = Config { blocks, group, zero_points, bf16 };
    let layout = layout(k, n);
    let scales = ScaleLayout::new(&layout, spec.group);
    let lengths = [n, k, layout.n_padded() / COLUMNS, layout.k_padded() / 16, scales.groups_padded()].map(|length| length as u32);
    let [n, k, tiles_n, tiles_k, groups] = lengths;
    tracing::trace!(%problem, blocks, "gemv");
    // SAFETY: lengths were checked above against what the kernel derives its addresses from.
    unsafe {
        kernel::norm_matmul::launch_unchecked(
            client,
            CubeCount::new_1d(tiles_n * blocks as u32),
            CubeDim::new_1d(THREADS as u32),
            x,
            residual,
            norm,
            sum,
            weight.words,
            weight.scales,
            weight.zero_points.into(),
            bias.into(),
            out,
            epsilon,
            LengthsLaunch::new(n, k, tiles_n, tiles_k, groups, LOW_NIBBLES, HIGH_NIBBLES),
            config,
            problem.activations.elem(),
        );
    }
    Ok(())
}
