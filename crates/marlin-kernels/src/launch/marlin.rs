//! The launch of the Marlin kernels of a dense weight.

use super::tile::{TileLaunch, TileOperands};
use super::{Operands, arranged, is_aligned};
use crate::problem::expect_presence;
use crate::tile::operands::{expect_arranged, expect_epilogue, expect_operands};
use crate::tile::{Launch, RowOrder, cost, row_length};
use crate::{Card, KernelError, Prologue, QuantProblem, fp8, pdl};
use cubecl::client::Client;

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
    let step = TileLaunch {
        problem,
        order: RowOrder::InOrder,
        launch,
        config,
        uses_pdl: pdl::is_supported_by(card.capability),
    };
    let operands = TileOperands {
        x,
        weight,
        row_scales,
        bias,
        row_blocks: None,
        tokens: None,
        out,
    };
    step.run(client, card, operands)
}
