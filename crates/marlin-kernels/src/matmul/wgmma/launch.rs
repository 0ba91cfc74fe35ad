use super::kernel;
use crate::tile::config::ATOM_K;
use crate::tile::lengths::lengths;
use crate::tile::workspace::Workspace;
use crate::tile::{Launch, cost, row_length};
use crate::{Card, KernelError, Operands, QuantProblem};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Launches the kernel on checked operands, whose activations are in the order of the stored rows.
pub(crate) fn launch(client: &Client, card: &Card, problem: &QuantProblem, launch: &Launch, operands: Operands) -> Result<(), KernelError> {
    let config = cost::format(problem).config(launch.tile);
    let workspace = Workspace::of_stream(client, card).area(problem, &config, launch.blocks)?;
    let Operands { x, weight, bias, out, .. } = operands;
    let x = activation_map(problem, launch, x)?;
    // SAFETY: lengths were checked against what the kernel derives its addresses from, and the workspace has room for `blocks` parts of tiles.
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
    Ok(())
}

/// The activations as the copy engine reads them: a box is a tile's rows by 64 rows of K, which lie in shared memory as `wgmma` reads them.
fn activation_map(problem: &QuantProblem, launch: &Launch, x: BufferArg) -> Result<TensorMapArg<Tiled>, KernelError> {
    let BufferArg::Handle { handle } = x else { return Err(KernelError::Alias { operand: "activations", problem: problem.to_string() }) };
    let (rows, columns) = (problem.m, row_length(problem.k()));
    let tensor = TensorBinding { shape: [rows, columns].into(), strides: [columns, 1].into(), ..handle.into_tensor() };
    let boxes = TiledArgs { tile_size: [launch.tile.rows(), ATOM_K].into() };
    Ok(TensorMapArg::new(boxes, tensor.into_tensor_arg(), problem.activations.elem()).with_swizzle(TensorMapSwizzle::B128))
}
