//! The layer of experts on CubeCL's runtimes: the kernels of
//! [`marlin_kernels::experts`](marlin_kernels::experts).

use super::ExpertsBackend;
use crate::backend::cube::{buffer, empty, launched, weight_buffers, weight_problem};
use crate::backend::{OptionalFloat, QuantTensors, activation_dtype};
use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Shape, Slice};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use marlin_format::{WeightDescriptor, WeightTensors};
use marlin_kernels::experts::{self, LayerOperands, RouteOperands, Router};
use marlin_kernels::{Epilogue, KernelError, Target};

impl ExpertsBackend for CubeBackend {
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
        let layer = Layer {
            correction: correction.into_option(),
            gate_up: (
                gate_up.into(),
                gate_up_descriptor,
                gate_up_bias.into_option(),
            ),
            down: (down.into(), down_descriptor, down_bias.into_option()),
            router,
            factor: factor as f32,
            epilogue,
        };
        launched(layer.launch(x, logits))
    }
}

/// A weight of experts, its description and its biases.
type Weight = (
    WeightTensors<CubeTensor>,
    WeightDescriptor,
    Option<CubeTensor>,
);

/// The operands of a layer that are the same for every token.
#[derive(Clone)]
struct Layer {
    correction: Option<CubeTensor>,
    gate_up: Weight,
    down: Weight,
    router: Router,
    factor: f32,
    /// What is computed from gates and ups.
    epilogue: Epilogue,
}

impl Layer {
    /// Launches the kernels for all tokens, or for blocks of tokens where one launch cannot address
    /// all rows.
    fn launch(self, x: CubeTensor, logits: CubeTensor) -> Result<CubeTensor, KernelError> {
        let (tokens, k) = (logits.shape()[0], self.gate_up.1.k);
        let widest = self.gate_up.1.n.max(self.down.1.n).max(k);
        let most_tokens = experts::most_tokens(&self.router, widest);
        if tokens <= most_tokens {
            return self.launch_block(x, logits);
        }
        let mut parts = Vec::new();
        for start in (0..tokens).step_by(most_tokens) {
            let rows = start..tokens.min(start + most_tokens);
            let of_block = |tensor: &CubeTensor| {
                let slices = [Slice::from(rows.clone()), Slice::full()];
                CubeBackend::float_slice(tensor.clone(), &slices)
            };
            let (x, logits) = (of_block(&x), of_block(&logits));
            parts.push(self.clone().launch_block(x, logits)?);
        }
        Ok(CubeBackend::float_cat(parts, 0))
    }

    fn launch_block(self, x: CubeTensor, logits: CubeTensor) -> Result<CubeTensor, KernelError> {
        let client = x.client.clone();
        let tokens = logits.shape()[0];
        let problem = |(weight, descriptor, _): &Weight, epilogue| {
            let rows = tokens * self.router.top_k;
            Ok::<_, KernelError>(
                weight_problem(weight, descriptor, rows, x.dtype)?.with_epilogue(epilogue),
            )
        };
        let gate_up = problem(&self.gate_up, self.epilogue)?;
        let down = problem(&self.down, Epilogue::None)?;
        let target = Target::of(&client);
        let plan =
            super::plan(&gate_up, &down, tokens, &target).ok_or_else(|| KernelError::Shape {
                problem: gate_up.to_string(),
                reason: "no kernel of this device takes experts of this format",
            })?;
        let out = empty(&x, Shape::new([tokens, down.n()]), x.dtype);
        let dtype = activation_dtype(logits.dtype).ok_or_else(|| KernelError::Dtype {
            runtime: target.runtime,
            dtype: logits.dtype.name(),
        })?;
        let operands = LayerOperands {
            x: buffer(x),
            route: RouteOperands {
                logits: buffer(logits),
                dtype,
                correction: self.correction.map(buffer),
                factor: self.factor,
            },
            gate_up: weight_buffers(self.gate_up.0),
            gate_up_bias: self.gate_up.2.map(buffer),
            down: weight_buffers(self.down.0),
            down_bias: self.down.2.map(buffer),
            out: out.clone().into_buffer_arg(),
        };
        experts::layer(&client, self.router, &gate_up, &down, &plan, operands)?;
        Ok(out)
    }
}
