//! The launch of the Marlin kernels, with `mma.sync` or with `wgmma`.

use super::{Operands, arranged, is_aligned, swizzled_map};
use crate::matmul::{mma_sync, wgmma};
use crate::problem::expect_presence;
use crate::tile::operands::{expect_arranged, expect_epilogue, expect_operands};
use crate::tile::sizes::sizes;
use crate::tile::workspace::Workspace;
use crate::tile::{Launch, RowOrder, cost, row_length};
use crate::{Card, KernelError, Prologue, QuantProblem, fp8, pdl};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Launches the kernel of a launch's tile.
pub(super) fn launch(
    client: &Client,
    card: &Card,
    problem: &QuantProblem,
    launch: &Launch,
    operands: Operands,
) -> Result<(), KernelError> {
    expect_operands(
        problem,
        &operands.weight,
        operands.bias.as_ref(),
        &operands.out,
    )?;
    let config = cost::format(problem).config(launch.tile);
    expect_epilogue(problem, launch, &config)?;
    if launch.tile.is_fp8() && !cost::takes_fp8(problem) {
        return Err(KernelError::Fp8 {
            problem: problem.to_string(),
        });
    }
    if launch.blocks == 0
        || launch.tile.is_clustered()
            && cost::blocks(problem, &launch.tile, card) != Some(launch.blocks)
    {
        return Err(KernelError::Blocks {
            problem: problem.to_string(),
            tile: launch.tile,
            blocks: launch.blocks,
        });
    }
    if problem.m == 0 {
        return Ok(());
    }
    let Operands {
        x,
        norm,
        mut weight,
        bias,
        out,
    } = operands;
    let row_permutation = weight.row_permutation.take();
    let is_arranged =
        row_permutation.is_none() && row_length(problem.k()) == problem.k() && is_aligned(&x);
    let x = if is_arranged {
        x
    } else {
        arranged(client, problem, x, row_permutation)?
    };
    expect_arranged(problem, &x)?;
    let (x, row_scales) = if launch.tile.is_fp8() {
        let has_norm = problem.prologue == Prologue::AddRmsNorm;
        expect_presence(problem, "norm", has_norm, norm.is_some())?;
        let rows = fp8::quantize(client, card, problem, x, norm)?;
        (rows.codes, Some(rows.scales))
    } else {
        (x, None)
    };
    let workspace = Workspace::of_stream(client, card).area(problem, &config, launch.blocks)?;
    let (blocks, threads) = (
        CubeCount::new_1d(launch.blocks as u32),
        CubeDim::new_1d(config.block_threads() as u32),
    );
    // SAFETY: the buffers' lengths were checked against the lengths from which the kernels derive
    // their addresses, and the workspace has room for `blocks` parts of tiles.
    unsafe {
        if launch.tile.is_wgmma() {
            let columns = row_length(problem.k()) * launch.tile.activation_bytes() / 2;
            let map = swizzled_map(
                x,
                [problem.m, columns],
                launch.tile.rows(),
                problem.activations,
            );
            wgmma::matmul::launch_unchecked(
                client,
                blocks,
                threads,
                map.ok_or_else(|| KernelError::Alias {
                    operand: "activations",
                    problem: problem.to_string(),
                })?,
                weight.qweight,
                weight.metadata.into(),
                weight.scales,
                weight.zero_points.into(),
                row_scales.into(),
                bias.into(),
                None.into(),
                out,
                workspace,
                sizes(problem, RowOrder::InOrder, launch),
                config,
                problem.activations.elem(),
            );
        } else {
            mma_sync::matmul::launch_unchecked(
                client,
                blocks,
                threads,
                x,
                weight.qweight,
                weight.metadata.into(),
                weight.scales,
                weight.zero_points.into(),
                row_scales.into(),
                bias.into(),
                None.into(),
                None.into(),
                out,
                workspace,
                sizes(problem, RowOrder::InOrder, launch),
                config,
                pdl::is_supported_by(card.capability),
                problem.activations.elem(),
            );
        }
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}
