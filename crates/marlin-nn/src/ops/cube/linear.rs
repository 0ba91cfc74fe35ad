//! Linear layers with a quantised weight after a norm, and with a float weight for many rows.

use super::aligned;
use crate::ops::DecodeBackend;
use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_marlin::backend::cube::{buffer, empty, launch_linear, weight_buffers, weight_problem};
use burn_marlin::backend::{linear_shape, tma};
use marlin_format::{WeightDescriptor, WeightTensors};
use marlin_kernels::{
    Epilogue, EpilogueStage, KernelError, NormOperands, Operands, Prologue, PrologueStage, Target,
    plan,
};

/// The lowest compute capability with the tensor memory accelerator (90 for 9.0).
const TMA_CAPABILITY: u32 = 90;

/// The input of a linear layer before its norm: the layer is applied to the RMSNorm of `x +
/// residual`.
pub(super) struct Normed {
    pub x: CubeTensor,
    pub residual: CubeTensor,
    pub norm: CubeTensor,
    pub epsilon: f64,
}

/// Applies a quantised linear layer to normalised activations. Runs one launch if the plan computes
/// the norm and the epilogue in the matmul's kernel. Otherwise the norm runs before the matmul, and
/// the epilogue after the matmul.
pub(super) fn norm_linear(
    normed: Normed,
    weight: WeightTensors<CubeTensor>,
    descriptor: &WeightDescriptor,
    bias: Option<CubeTensor>,
    epilogue: Epilogue,
) -> Result<(CubeTensor, CubeTensor), KernelError> {
    let Normed {
        x,
        residual,
        norm,
        epsilon,
    } = normed;
    let client = x.client.clone();
    let problem = weight_problem(
        &weight,
        descriptor,
        x.shape().num_elements() / descriptor.k,
        x.dtype,
    )?;
    let problem = problem
        .with_prologue(Prologue::AddRmsNorm)
        .with_epilogue(epilogue);
    let plan = plan(problem, &Target::of(&client));
    if plan.epilogue == EpilogueStage::After {
        let (out, sum) = norm_linear(
            Normed {
                x,
                residual,
                norm,
                epsilon,
            },
            weight,
            descriptor,
            bias,
            Epilogue::None,
        )?;
        return Ok((CubeBackend::decode_gated(out, epilogue), sum));
    }
    if plan.prologue != PrologueStage::InKernel {
        let (normalised, sum) = CubeBackend::decode_add_rms_norm(x, residual, norm, epsilon);
        return Ok((
            launch_linear(normalised, weight, descriptor, bias, epilogue)?,
            sum,
        ));
    }
    let out_shape = linear_shape(&x.shape(), problem.outputs());
    let (out, sum) = (empty(&x, out_shape, x.dtype), empty(&x, x.shape(), x.dtype));
    let [x, residual, norm] = [x, residual, norm].map(|tensor| aligned(tensor).into_buffer_arg());
    let operands = Operands {
        x,
        norm: Some(NormOperands {
            residual,
            weight: norm,
            sum: sum.clone().into_buffer_arg(),
            epsilon: epsilon as f32,
        }),
        weight: weight_buffers(weight),
        bias: bias.map(buffer),
        out: out.clone().into_buffer_arg(),
    };
    marlin_kernels::launch(&client, &problem, &plan, operands)?;
    Ok((out, sum))
}

/// Multiplies `x` [M, K] with `weight` [K, N], without autotuning: by [`tma::matmul`] on cards that
/// have the tensor memory accelerator, otherwise as
/// [`decode_matmul`](DecodeBackend::decode_matmul).
pub(super) fn many_rows(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let has_tma = Target::of(&x.client).capability() >= TMA_CAPABILITY && x.dtype.size() == 2;
    has_tma
        .then(|| tma::matmul(&x, &weight, x.dtype))
        .flatten()
        .unwrap_or_else(|| CubeBackend::decode_matmul(x, weight))
}
