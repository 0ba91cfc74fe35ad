use super::kernel;
use crate::device::swizzled_map;
use crate::tile::lengths::lengths;
use crate::tile::workspace::Workspace;
use crate::tile::{Launch, cost, row_length};
use crate::{Card, KernelError, Operands, QuantProblem, overlap};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Launches the kernel on checked operands. The activations must be in the order of the stored
/// rows.
pub(crate) fn launch(
    client: &Client,
    card: &Card,
    problem: &QuantProblem,
    launch: &Launch,
    operands: Operands,
) -> Result<(), KernelError> {
    let config = cost::format(problem).config(launch.tile);
    let workspace = Workspace::of_stream(client, card).area(problem, &config, launch.blocks)?;
    let Operands {
        x,
        weight,
        bias,
        out,
        ..
    } = operands;
    let map = swizzled_map(
        x,
        [problem.m, row_length(problem.k())],
        launch.tile.rows(),
        problem.activations,
    );
    let x = map.ok_or_else(|| KernelError::Alias {
        operand: "activations",
        problem: problem.to_string(),
    })?;
    // SAFETY: the buffers' lengths were checked against the lengths from which the kernel derives
    // its addresses, and the workspace has room for `blocks` parts of tiles.
    unsafe {
        kernel::matmul::launch_unchecked(
            client,
            CubeCount::new_1d(launch.blocks as u32),
            CubeDim::new_1d(config.block_threads() as u32),
            x,
            weight.words,
            weight.metadata.into(),
            weight.scales,
            weight.zero_points.into(),
            bias.into(),
            out,
            workspace,
            lengths(problem, launch),
            config,
            problem.activations.elem(),
        );
    }
    overlap::follow(client);
    Ok(())
}
