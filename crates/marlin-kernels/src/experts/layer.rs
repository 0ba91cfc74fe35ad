use super::{
    ExpertOperands, LayerPlan, RouteOperands, Router, RowPlan, TilePlan, combine, multiply, route,
};
use crate::matmul::gemv::experts::{self as gemv, ExpertGemvOperands, ExpertRows};
use crate::tile::RowOrder;
use crate::{KernelError, QuantProblem, WeightBuffers};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Operands of [`layer`]. All are contiguous, at addresses that are multiples of 16.
pub struct LayerOperands {
    /// The activations [tokens, hidden].
    pub x: BufferArg,
    /// The router's logits, and what chooses experts beside them.
    pub route: RouteOperands,
    /// The weight of gates and ups of all experts [experts, hidden, 2 x intermediate], in the tile
    /// layout.
    pub gate_up: WeightBuffers,
    /// The biases of gates and ups [experts, 2 x intermediate].
    pub gate_up_bias: Option<BufferArg>,
    /// The weight of down of all experts [experts, intermediate, hidden], in the tile layout.
    pub down: WeightBuffers,
    /// The biases of down [experts, hidden].
    pub down_bias: Option<BufferArg>,
    /// The output [tokens, hidden].
    pub out: BufferArg,
}

/// Computes a layer of experts with SwiGLU from its router's logits: the weighted sum of the
/// outputs of each token's experts. The problems' M is the number of rows, tokens x `top_k`; the
/// epilogue of the first is a SwiGLU.
///
/// # Errors
/// An error for operands of the wrong length, and for problems and a router that the plan is not
/// for.
pub fn layer(
    client: &Client,
    router: Router,
    gate_up: &QuantProblem,
    down: &QuantProblem,
    plan: &LayerPlan,
    operands: LayerOperands,
) -> Result<(), KernelError> {
    match plan {
        LayerPlan::Rows(plan) => rows(client, router, gate_up, down, plan, operands),
        LayerPlan::Tiles(plan) => tiles(client, router, gate_up, down, plan, operands),
    }
}

/// Computes a layer of few rows in two launches.
fn rows(
    client: &Client,
    router: Router,
    gate_up: &QuantProblem,
    down: &QuantProblem,
    plan: &RowPlan,
    operands: LayerOperands,
) -> Result<(), KernelError> {
    let elements = gate_up.m * gate_up.outputs();
    let gated = client.empty(elements.max(1) * gate_up.activations.elem().size());
    // SAFETY: the buffer was allocated with these elements.
    let gated = || unsafe { BufferArg::from_raw_parts(gated.clone(), elements) };
    let gates = ExpertGemvOperands {
        x: operands.x,
        route: operands.route.second(gate_up)?,
        weight: operands.gate_up,
        bias: operands.gate_up_bias,
        out: gated(),
    };
    let rows = ExpertRows::Gathered;
    gemv::launch(client, gate_up, rows, router, plan.gate_up, gates)?;
    let sums = ExpertGemvOperands {
        x: gated(),
        route: operands.route,
        weight: operands.down,
        bias: operands.down_bias,
        out: operands.out,
    };
    gemv::launch(client, down, ExpertRows::Summed, router, plan.down, sums)
}

/// Computes a layer with tiles of rows of one expert.
fn tiles(
    client: &Client,
    router: Router,
    gate_up: &QuantProblem,
    down: &QuantProblem,
    plan: &TilePlan,
    operands: LayerOperands,
) -> Result<(), KernelError> {
    let LayerOperands {
        x,
        route: of_router,
        gate_up: gate_up_weight,
        gate_up_bias,
        down: down_weight,
        down_bias,
        out,
    } = operands;
    let (tokens, dtype) = (gate_up.m / router.top_k.max(1), gate_up.activations);
    let routing = route(client, router, tokens, plan.block_rows, of_router)?;
    let temporary = |features: usize| {
        let elements = routing.rows() * features;
        let handle = client.empty(elements.max(1) * dtype.elem().size());
        // SAFETY: the buffer was allocated with these elements.
        move || unsafe { BufferArg::from_raw_parts(handle.clone(), elements) }
    };
    let (gated, rows) = (temporary(gate_up.outputs()), temporary(down.n()));
    for (problem, order, launch, x, weight, bias, out) in [
        (
            gate_up,
            RowOrder::Gathered,
            &plan.gate_up,
            x,
            gate_up_weight,
            gate_up_bias,
            gated(),
        ),
        (
            down,
            RowOrder::Sorted,
            &plan.down,
            gated(),
            down_weight,
            down_bias,
            rows(),
        ),
    ] {
        let operands = ExpertOperands {
            x,
            weight,
            bias,
            out,
        };
        multiply(client, problem, order, launch, &routing, operands)?;
    }
    combine(client, &routing, down.n(), dtype, rows(), None, out)
}
