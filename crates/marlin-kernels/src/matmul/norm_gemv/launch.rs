use super::config::LengthsLaunch;
use super::config::{COLUMNS, Config, THREADS};
use super::kernel;
use super::plan::{CLUSTERS, takes_format};
use crate::problem::expect_length;
use crate::tile::cost::format;
use crate::tile::lengths::nibble_masks;
use crate::{KernelError, NormOperands, Operands, QuantProblem};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Launches the kernel on clusters of `blocks` blocks, on operands that were checked but for those of the norm.
///
/// # Errors
/// Not one row, a single group, act-order, a K that is no multiple of 8, blocks that are no cluster, and buffers of the wrong length.
pub(crate) fn launch(client: &Client, problem: &QuantProblem, blocks: usize, operands: Operands) -> Result<(), KernelError> {
    let (n, k) = (problem.n(), problem.k());
    let format = format(problem);
    let takes = problem.m == 1 && k.is_multiple_of(8) && !problem.weight.format.permuted && takes_format(&format);
    let Operands { x, norm: Some(norm), weight, bias, out } = operands else {
        return Err(KernelError::NoNormGemv { problem: problem.to_string(), blocks });
    };
    if !takes || !CLUSTERS.contains(&blocks) {
        return Err(KernelError::NoNormGemv { problem: problem.to_string(), blocks });
    }
    let NormOperands { residual, weight: norm, sum, epsilon } = norm;
    for (operand, buffer) in [("activations", &x), ("residual", &residual), ("norm weight", &norm), ("sum", &sum)] {
        expect_length(problem, operand, k, buffer.len())?;
    }
    let config = Config::new(blocks, &format);
    let tiles = problem.weight.tiles();
    let lengths = [n, k, tiles.n_padded() / COLUMNS, tiles.shape()[0], problem.weight.groups()].map(|length| length as u32);
    let [n, k, tiles_n, tiles_k, groups] = lengths;
    // SAFETY: lengths were checked against what the kernel derives its addresses from.
    unsafe {
        kernel::norm_matmul::launch_unchecked(
            client,
            CubeCount::new_1d(tiles_n * blocks as u32),
            CubeDim::new_1d(THREADS as u32),
            config.lane_values(),
            x,
            residual,
            norm,
            sum,
            weight.words,
            weight.metadata.into(),
            weight.scales,
            weight.zero_points.into(),
            bias.into(),
            out,
            epsilon,
            LengthsLaunch::new(n, k, tiles_n, tiles_k, groups, nibble_masks()),
            config,
            problem.activations.elem(),
        );
    }
    Ok(())
}
