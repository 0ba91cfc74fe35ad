//! The layer of experts on Flex: Rust code on the CPU.

use super::ExpertsBackend;
use crate::backend::flex::{computed, from_f32, to_f32, weight_problem, with_host_weight};
use crate::backend::{OptionalFloat, QuantTensors};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape};
use marlin_format::WeightDescriptor;
use marlin_kernels::Epilogue;
use marlin_kernels::experts::Router;
use marlin_kernels::experts::host::{self, HostRouting};

impl ExpertsBackend for Flex {
    fn quant_experts(
        x: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        correction: OptionalFloat<Self>,
        gate_up: QuantTensors<Self>,
        gate_up_descriptor: WeightDescriptor,
        gate_up_bias: OptionalFloat<Self>,
        down: QuantTensors<Self>,
        down_descriptor: WeightDescriptor,
        down_bias: OptionalFloat<Self>,
        router: Router,
        factor: f64,
        epilogue: Epilogue,
    ) -> FloatTensor<Self> {
        let (tokens, dtype) = (logits.shape()[0], x.dtype());
        let values = |tensor: FloatTensor<Self>| to_f32(&tensor.to_contiguous()).into_owned();
        let correction = correction.into_option().map(values);
        let routing = computed(host::route(
            &router,
            &values(logits),
            correction.as_deref(),
            factor as f32,
        ));
        let rows = gathered(&values(x), gate_up_descriptor.k, router.top_k);
        let gates_and_ups = multiply(
            &rows,
            &routing,
            gate_up,
            gate_up_descriptor,
            gate_up_bias.into_option().map(values),
            dtype,
        );
        let gated = gated(epilogue, &gates_and_ups, down_descriptor.k);
        let rows = multiply(
            &gated,
            &routing,
            down,
            down_descriptor,
            down_bias.into_option().map(values),
            dtype,
        );
        let features = down_descriptor.n;
        let sums = computed(host::combine(&routing, router.top_k, features, &rows));
        from_f32(sums, Shape::new([tokens, features]), dtype)
    }
}

/// Returns each of the rows of `k` activations `top_k` times.
fn gathered(x: &[f32], k: usize, top_k: usize) -> Vec<f32> {
    x.chunks_exact(k.max(1))
        .flat_map(|row| std::iter::repeat_n(row, top_k).flatten())
        .copied()
        .collect()
}

fn multiply(
    x: &[f32],
    routing: &HostRouting,
    weight: QuantTensors<Flex>,
    descriptor: WeightDescriptor,
    bias: Option<Vec<f32>>,
    dtype: DType,
) -> Vec<f32> {
    let problem = weight_problem(&weight, &descriptor, routing.experts.len(), dtype);
    with_host_weight(weight.into(), |weight| {
        host::multiply(&problem, x, &routing.experts, weight, bias.as_deref())
    })
}

/// Returns the outputs of rows of gates and ups, `width` of each.
fn gated(epilogue: Epilogue, gates_and_ups: &[f32], width: usize) -> Vec<f32> {
    gates_and_ups
        .chunks_exact((2 * width).max(1))
        .flat_map(|row| {
            let (gates, ups) = row.split_at(width);
            let pairs = gates.iter().zip(ups);
            pairs.map(|(&gate, &up)| epilogue.gated(gate, up))
        })
        .collect()
}
