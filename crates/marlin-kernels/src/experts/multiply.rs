use super::plan::of_problem;
use super::{GatherOperands, Router, Routing, gather};
use crate::launch::tile::{TileLaunch, TileOperands};
use crate::problem::{expect_at_most, expect_length};
use crate::tile::candidates::takes_experts;
use crate::tile::operands::{expect_dtypes, expect_epilogue};
use crate::tile::rows::RowOrder;
use crate::tile::{Config, Launch, row_length};
use crate::{
    Kernel, KernelError, Prologue, QuantProblem, Target, WeightBuffers, pdl, problem::MAX_ELEMENTS,
};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_format::{Sparsity, WeightDescriptor};
use std::sync::atomic::Ordering;

/// Operands of [`multiply`]. All are contiguous, at addresses that are multiples of 16.
pub struct ExpertOperands {
    /// The activations: [tokens, K] gathered, [rows, K] sorted.
    pub x: BufferArg,
    /// The weight of all experts in the tile layout.
    pub weight: WeightBuffers,
    /// The biases [experts, N] in the activations' dtype.
    pub bias: Option<BufferArg>,
    /// The output [rows, N] in the order of experts, [rows, N / 2] with SwiGLU. Every element is
    /// written.
    pub out: BufferArg,
}

/// Multiplies each row by the matrix of its expert. `problem` describes all rows of the routing
/// (M = tokens x `top_k`) and the weight with its experts; the tile of `launch` has as many rows as
/// the routing's blocks.
///
/// Rows of tokens are gathered by a kernel of their own ([`gather`]) for a tile of `wgmma`, and
/// rows of either order for a weight with act-order.
///
/// # Errors
/// Returns an error for a buffer of the wrong length, a routing of another number of rows, experts
/// or rows of a block, f32 activations, scales in another dtype than the activations, a 2:4 weight,
/// a K that is not a multiple of 8, and a device that is no NVIDIA card.
pub fn multiply(
    client: &Client,
    problem: &QuantProblem,
    order: RowOrder,
    launch: &Launch,
    routing: &Routing,
    operands: ExpertOperands,
) -> Result<(), KernelError> {
    let ExpertOperands {
        x,
        mut weight,
        bias,
        out,
    } = operands;
    let row_permutation = weight.row_permutation.take();
    let is_gathered = order == RowOrder::Gathered && launch.tile.is_wgmma();
    if row_permutation.is_none() && !is_gathered {
        let operands = ExpertOperands {
            x,
            weight,
            bias,
            out,
        };
        return multiply_in_place(client, problem, order, launch, routing, operands);
    }
    let (k, dtype) = (problem.k(), problem.activations);
    let elements = routing.rows() * k;
    let sorted = client.empty(elements.max(1) * dtype.elem().size());
    // SAFETY: the buffer was allocated with these elements.
    let sorted = || unsafe { BufferArg::from_raw_parts(sorted.clone(), elements) };
    let gathered = GatherOperands {
        x,
        row_permutation,
        out: sorted(),
    };
    gather(client, routing, order, k, dtype, gathered)?;
    let in_order = QuantProblem {
        weight: WeightDescriptor {
            format: problem.weight.format.with_permutation(false),
            ..problem.weight
        },
        ..*problem
    };
    let operands = ExpertOperands {
        x: sorted(),
        weight,
        bias,
        out,
    };
    multiply_in_place(
        client,
        &in_order,
        RowOrder::Sorted,
        launch,
        routing,
        operands,
    )
}

/// Multiplies rows where they are, by a weight without act-order.
fn multiply_in_place(
    client: &Client,
    problem: &QuantProblem,
    order: RowOrder,
    launch: &Launch,
    routing: &Routing,
    operands: ExpertOperands,
) -> Result<(), KernelError> {
    let target = Target::of(client);
    let Some(card) = target.card else {
        return Err(KernelError::NotLaunchable {
            kernel: Kernel::Marlin(*launch),
            runtime: target.runtime,
        });
    };
    let config = of_problem(problem, order).config(launch.tile);
    expect_problem(problem, order, launch, &config, routing)?;
    expect_lengths(problem, order, routing, &operands)?;
    if problem.m == 0 {
        return Ok(());
    }
    let ExpertOperands {
        x,
        weight,
        bias,
        out,
    } = operands;
    // A kernel with sorted rows reads the routing before it waits for the kernel before it.
    let overlaps = order == RowOrder::Gathered || routing.is_complete.load(Ordering::Relaxed);
    let uses_pdl = overlaps && pdl::is_supported_by(card.capability);
    let step = TileLaunch {
        problem,
        order,
        launch,
        config,
        uses_pdl,
    };
    let operands = TileOperands {
        x,
        weight,
        row_scales: None,
        bias,
        row_blocks: Some(routing.blocks()),
        tokens: match order {
            RowOrder::Gathered => Some(routing.of_rows(&routing.tokens)),
            _ => None,
        },
        out,
    };
    step.run(client, &card, operands)?;
    // This kernel began after the routing, so the next one may read it early.
    if order == RowOrder::Gathered || !uses_pdl {
        routing.is_complete.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// Checks that the kernel supports a problem, and that the routing and the launch are for it.
fn expect_problem(
    problem: &QuantProblem,
    order: RowOrder,
    launch: &Launch,
    config: &Config,
    routing: &Routing,
) -> Result<(), KernelError> {
    let refuse = |reason| {
        Err(KernelError::Shape {
            problem: problem.to_string(),
            reason,
        })
    };
    let Router { experts, .. } = routing.router;
    expect_dtypes(problem)?;
    if !order.has_experts() {
        return refuse("rows in order have no experts; gather or sort them");
    }
    if (problem.weight.experts, problem.m) != (experts, routing.rows()) {
        return refuse("the routing has another number of experts or rows");
    }
    let format = problem.weight.format;
    if format.sparsity != Sparsity::Dense || format.permuted {
        return refuse("experts are dense, and their rows in their natural order");
    }
    if row_length(problem.k()) != problem.k() || problem.prologue != Prologue::None {
        return refuse("with experts K is a multiple of 8, and no norm is before the product");
    }
    if !takes_experts(&launch.tile, order)
        || launch.tile.rows() != routing.block_rows
        || launch.blocks == 0
    {
        return Err(KernelError::Blocks {
            problem: problem.to_string(),
            tile: launch.tile,
            blocks: launch.blocks,
        });
    }
    expect_epilogue(problem, launch, config)
}

/// Checks the lengths of the operands.
fn expect_lengths(
    problem: &QuantProblem,
    order: RowOrder,
    routing: &Routing,
    operands: &ExpertOperands,
) -> Result<(), KernelError> {
    problem.expect_weight(&operands.weight.as_ref().map(|_, buffer| buffer.len()))?;
    let rows = match order {
        RowOrder::Gathered => routing.count,
        _ => routing.rows(),
    };
    let (k, n) = (problem.k(), problem.n());
    expect_length(problem, "activations", rows * k, operands.x.len())?;
    expect_length(
        problem,
        "output",
        problem.m * problem.outputs(),
        operands.out.len(),
    )?;
    if let Some(bias) = &operands.bias {
        expect_length(problem, "bias", problem.weight.experts * n, bias.len())?;
    }
    let largest = problem.m.saturating_mul(k.max(n));
    expect_at_most(problem, largest, MAX_ELEMENTS)
}
