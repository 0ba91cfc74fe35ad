use super::config::GemvSizesLaunch;
use super::config::{COLUMNS, GemvConfig, THREADS};
use super::kernel;
use super::plan::{CLUSTERS, fits_cluster, takes_format};
use crate::problem::expect_length;
use crate::tile::cost::format;
use crate::tile::sizes::nibble_masks;
use crate::{KernelError, NormOperands, Operands, Prologue, QuantProblem, pdl};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Launches the kernel with K split among `blocks` blocks. The operands must have been checked,
/// except for those of the norm.
///
/// # Errors
/// Returns an error for a number of rows other than one, a norm without its operands, a format that
/// [`takes_format`] refuses (such as a single group), act-order, a K that is not a multiple of 8,
/// gates that do not fill whole tiles, a number of blocks that is not a valid cluster size, or
/// buffers of the wrong length.
pub(crate) fn launch(
    client: &Client,
    problem: &QuantProblem,
    blocks: usize,
    operands: Operands,
) -> Result<(), KernelError> {
    let (n, k) = (problem.outputs(), problem.k());
    let config = GemvConfig::new(blocks, &format(problem), problem.prologue);
    let takes = problem.m == 1
        && k.is_multiple_of(8)
        && !problem.weight.format.permuted
        && problem.divides_into(2 * COLUMNS)
        && takes_format(&config);
    let Operands {
        x,
        norm,
        weight,
        bias,
        out,
    } = operands;
    if !takes
        || norm.is_some() != (problem.prologue == Prologue::AddRmsNorm)
        || !CLUSTERS.contains(&blocks)
        || !fits_cluster(problem, blocks)
    {
        return Err(KernelError::NoGemv {
            problem: problem.to_string(),
            blocks,
        });
    }
    expect_length(problem, "activations", k, x.len())?;
    let epsilon = norm.as_ref().map_or(0.0, |norm| norm.epsilon);
    let [residual, norm, sum] = NormOperands::arguments(norm, problem)?;
    let tiles = problem.weight.tiles();
    let sizes = [
        n,
        k,
        tiles.n_padded() / COLUMNS,
        tiles.shape()[0],
        problem.weight.groups(),
    ]
    .map(|length| length as u32);
    let [n, k, tiles_n, tiles_k, groups] = sizes;
    // SAFETY: the buffers' lengths were checked against the lengths from which the kernel derives
    // its addresses.
    unsafe {
        kernel::gemv::launch_unchecked(
            client,
            CubeCount::new_1d(tiles_n * blocks as u32),
            CubeDim::new_1d(THREADS as u32),
            config.lane_values(),
            x,
            residual.into(),
            norm.into(),
            sum.into(),
            weight.qweight,
            weight.metadata.into(),
            weight.scales,
            weight.zero_points.into(),
            bias.into(),
            out,
            epsilon,
            GemvSizesLaunch::new(n, k, tiles_n, tiles_k, groups, nibble_masks()),
            config,
            problem.activations.elem(),
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}
