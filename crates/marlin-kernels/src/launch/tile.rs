//! The launch of a kernel of tiles, with `mma.sync` or with `wgmma`.

use super::{WeightBuffers, swizzled_map};
use crate::matmul::{mma_sync, wgmma};
use crate::tile::rows::RowOrder;
use crate::tile::sizes::sizes;
use crate::tile::workspace::Workspace;
use crate::tile::{Config, Launch, row_length};
use crate::{Card, KernelError, QuantProblem, pdl};
use cubecl::client::Client;
use cubecl::prelude::*;

/// A launch of a kernel of tiles, whose problem has been checked.
pub(crate) struct TileLaunch<'a> {
    /// The product.
    pub problem: &'a QuantProblem,
    /// The order of the rows of the activations.
    pub order: RowOrder,
    /// The tile and the number of blocks.
    pub launch: &'a Launch,
    /// The configuration of the kernel.
    pub config: Config,
    /// True if the kernel may start before the one in front of it ends.
    pub uses_pdl: bool,
}

/// Buffers of a kernel of tiles, whose lengths have been checked. All are contiguous, at addresses
/// that are multiples of 16.
pub(crate) struct TileOperands {
    /// The activations in the order of the stored rows, their rows padded to [`row_length`]; with a
    /// tile of e4m3 their codes.
    pub x: BufferArg,
    /// The weight in the tile's layout, without a permutation.
    pub weight: WeightBuffers,
    /// The scales `[M]` of the codes' rows.
    pub row_scales: Option<BufferArg>,
    /// The bias `[N]`, with experts [experts, N].
    pub bias: Option<BufferArg>,
    /// The blocks of rows of each expert.
    pub row_blocks: Option<BufferArg>,
    /// The token of each row, where rows are gathered.
    pub tokens: Option<BufferArg>,
    /// The output. Every element is written.
    pub out: BufferArg,
}

impl TileLaunch<'_> {
    /// Launches the kernel.
    ///
    /// # Errors
    /// [`KernelError::Alias`] for activations that are an alias of another operand, where the
    /// kernel reads them through a tensor map, and the errors of the workspace.
    pub(crate) fn run(
        self,
        client: &Client,
        card: &Card,
        operands: TileOperands,
    ) -> Result<(), KernelError> {
        let Self {
            problem,
            order,
            launch,
            config,
            uses_pdl,
        } = self;
        let TileOperands {
            x,
            weight,
            row_scales,
            bias,
            row_blocks,
            tokens,
            out,
        } = operands;
        let workspace = Workspace::of_stream(client, card).area(problem, &config, launch.blocks)?;
        let (blocks, threads) = (
            CubeCount::new_1d(launch.blocks as u32),
            CubeDim::new_1d(config.block_threads() as u32),
        );
        // SAFETY: the buffers' lengths were checked against the lengths from which the kernels
        // derive their addresses, tables of a routing have rows, tokens and experts of the problem
        // alone, and the workspace has room for `blocks` parts of tiles.
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
                    row_blocks.into(),
                    out,
                    workspace,
                    sizes(problem, order, launch),
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
                    row_blocks.into(),
                    tokens.into(),
                    out,
                    workspace,
                    sizes(problem, order, launch),
                    config,
                    uses_pdl,
                    problem.activations.elem(),
                );
            }
        }
        if uses_pdl {
            pdl::make_edge_programmatic(client);
        }
        Ok(())
    }
}
