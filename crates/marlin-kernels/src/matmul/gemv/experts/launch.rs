use super::super::config::{COLUMNS, GemvSizesLaunch, THREADS};
use super::config::{ExpertGemvConfig, ExpertRows};
use super::kernel;
use super::plan::config;
use crate::device::CLUSTER_CAPABILITY;
use crate::experts::{RouteOperands, Router};
use crate::problem::{MAX_ELEMENTS, expect_at_most, expect_length};
use crate::tile::operands::expect_dtypes;
use crate::tile::sizes::nibble_masks;
use crate::{KernelError, QuantProblem, Target, WeightBuffers, pdl};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Operands of [`launch`]. All are contiguous, at addresses that are multiples of 16.
pub(crate) struct ExpertGemvOperands {
    /// The activations: [tokens, K] gathered, [tokens, top_k, K] summed.
    pub x: BufferArg,
    /// The router's logits, and what chooses experts beside them.
    pub route: RouteOperands,
    /// The weight of all experts in the tile layout.
    pub weight: WeightBuffers,
    /// The biases [experts, N] in the activations' dtype.
    pub bias: Option<BufferArg>,
    /// The output: [tokens, top_k, N] gathered, or [tokens, top_k, N / 2] with SwiGLU; [tokens, N]
    /// summed. Every element is written.
    pub out: BufferArg,
}

/// Multiplies the rows of tokens by their experts' matrices, with K split among `blocks` blocks.
/// `problem` describes all rows (M = tokens x `top_k`) and the weight with its experts.
///
/// In a recorded pass a kernel with summed rows must follow one with gathered rows and the same
/// logits.
///
/// # Errors
/// The errors of [`Router::check`]; an error for a buffer of the wrong length, and for a card,
/// a problem or a number of blocks that [`plan`](super::plan) does not give.
pub(crate) fn launch(
    client: &Client,
    problem: &QuantProblem,
    rows: ExpertRows,
    router: Router,
    blocks: usize,
    operands: ExpertGemvOperands,
) -> Result<(), KernelError> {
    let ExpertGemvOperands {
        x,
        route,
        weight,
        bias,
        out,
    } = operands;
    router.check()?;
    expect_dtypes(problem)?;
    let card = Target::of(client).card;
    let has_clusters = card.is_some_and(|card| card.capability >= CLUSTER_CAPABILITY);
    let gemv = config(problem, rows, router.top_k, blocks)
        .filter(|_| problem.weight.experts == router.experts && has_clusters)
        .ok_or_else(|| KernelError::NoGemv {
            problem: problem.to_string(),
            blocks,
        })?;
    let config = ExpertGemvConfig {
        gemv,
        rows,
        router,
        logits: route.dtype,
    };
    let (n, k, tokens) = (problem.outputs(), problem.k(), problem.m / router.top_k);
    problem.expect_weight(&weight.as_ref().map(|_, buffer| buffer.len()))?;
    let (rows_in, rows_out) = match rows {
        ExpertRows::Gathered => (tokens, problem.m),
        ExpertRows::Summed => (problem.m, tokens),
    };
    expect_length(problem, "activations", rows_in * k, x.len())?;
    expect_length(problem, "output", rows_out * n, out.len())?;
    let logits = tokens * router.experts;
    expect_length(problem, "logits", logits, route.logits.len())?;
    if let Some(correction) = &route.correction {
        expect_length(problem, "correction", router.experts, correction.len())?;
    }
    if let Some(bias) = &bias {
        expect_length(problem, "bias", router.experts * problem.n(), bias.len())?;
    }
    let tiles = problem.weight.tiles();
    let tiles_n = tiles.n_padded() / COLUMNS;
    let clusters = rows_out * tiles_n / problem.epilogue.columns();
    expect_at_most(problem, clusters * config.gemv.cluster(), MAX_ELEMENTS)?;
    expect_at_most(problem, problem.m.saturating_mul(k.max(n)), MAX_ELEMENTS)?;
    if problem.m == 0 {
        return Ok(());
    }
    let sizes = [n, k, tiles_n, tiles.shape()[0], problem.weight.groups()];
    let [n, k, tiles_n, tiles_k, groups] = sizes.map(|length| length as u32);
    // SAFETY: the buffers' lengths were checked against the lengths from which the kernel derives
    // its addresses, and the experts that it chooses are below the router's number of experts.
    unsafe {
        kernel::expert_gemv::launch_unchecked(
            client,
            CubeCount::new_1d((clusters * config.gemv.cluster()) as u32),
            CubeDim::new_1d(THREADS as u32),
            config.gemv.lane_values(),
            x,
            route.logits,
            route.correction.into(),
            route.factor,
            weight.qweight,
            weight.scales,
            weight.zero_points.into(),
            bias.into(),
            out,
            GemvSizesLaunch::new(n, k, tiles_n, tiles_k, groups, nibble_masks()),
            config,
            problem.activations.elem(),
            route.dtype.elem(),
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}
