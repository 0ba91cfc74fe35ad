//! The launches of a layer.

use super::layer::Layer;
use super::{Bench, DTYPE};
use crate::BenchError;
use crate::operands::buffer;
use cubecl::server::Handle;
use marlin_kernels::QuantProblem;
use marlin_kernels::experts::{self, LayerOperands, LayerPlan, Routing, TilePlan, combine};
use marlin_kernels::tile::RowOrder;

/// The buffers and problems of calls of a layer.
pub(super) struct Call<'a> {
    pub(super) bench: &'a Bench<'a>,
    pub(super) plan: LayerPlan,
    pub(super) problems: (QuantProblem, QuantProblem),
    /// The outputs of SwiGLU.
    pub(super) gated: Handle,
    pub(super) rows: Handle,
    pub(super) out: Handle,
    pub(super) logits: Handle,
}

impl Call<'_> {
    /// Launches the layer from the router's logits to the weighted sums.
    pub(super) fn layer(&self, call: usize, x: &Handle, logits: &Handle) -> Result<(), BenchError> {
        let Bench {
            client,
            layer,
            gate_up,
            down,
            ..
        } = self.bench;
        let tokens = self.problems.0.m / layer.top_k;
        let operands = LayerOperands {
            x: buffer(x, tokens * layer.hidden),
            route: self.bench.route_operands(tokens, logits),
            gate_up: gate_up.of_call(call, None),
            gate_up_bias: None,
            down: down.of_call(call, None),
            down_bias: None,
            out: buffer(&self.out, tokens * layer.hidden),
        };
        Ok(experts::layer(
            client,
            layer.router(),
            &self.problems.0,
            &self.problems.1,
            &self.plan,
            operands,
        )?)
    }

    pub(super) fn matmuls(
        &self,
        call: usize,
        x: &Handle,
        plan: &TilePlan,
        routing: &Routing,
    ) -> Result<(), BenchError> {
        let Layer {
            hidden,
            intermediate,
            ..
        } = self.bench.layer;
        let (gate_up, down) = &self.problems;
        let gated = || buffer(&self.gated, routing.rows() * intermediate);
        self.bench.multiply(
            gate_up,
            RowOrder::Gathered,
            &plan.gate_up,
            routing,
            call,
            [buffer(x, routing.count * hidden), gated()],
        )?;
        self.bench.multiply(
            down,
            RowOrder::Sorted,
            &plan.down,
            routing,
            call,
            [gated(), buffer(&self.rows, routing.rows() * hidden)],
        )
    }

    pub(super) fn sums(&self, routing: &Routing) -> Result<(), BenchError> {
        let Bench { client, layer, .. } = self.bench;
        let (rows, features) = (routing.rows(), layer.hidden);
        Ok(combine(
            client,
            routing,
            features,
            DTYPE,
            buffer(&self.rows, rows * features),
            None,
            buffer(&self.out, routing.count * features),
        )?)
    }
}
