//! Linear layers with a quantised weight after a norm, and with a float weight.

use super::{aligned, dtype_of, is_aligned};
use crate::ops::DecodeBackend;
use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_marlin::backend::cube::{buffer, empty, launch_linear, weight_buffers, weight_problem};
use burn_marlin::backend::{linear_shape, tma};
use marlin_format::{WeightDescriptor, WeightTensors};
use marlin_kernels::matmul::float::{self, FloatOperands};
use marlin_kernels::matmul::float_gemv::{self, FloatNorm};
use marlin_kernels::{
    Epilogue, EpilogueStage, FloatProblem, Kernel, KernelError, NormOperands, Operands, Prologue,
    PrologueStage, Target, plan,
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

/// Multiplies rows `x` [M, K] by a float weight [K, N], and adds a bias `[N]`.
pub(super) fn float_linear(
    x: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
) -> Result<CubeTensor, KernelError> {
    let (problem, kernel) = float_plan(&x, &weight);
    let (client, x) = (x.client.clone(), aligned(x));
    if kernel == Kernel::FloatMatmul {
        let out = many_rows(x, weight);
        return Ok(match bias {
            Some(bias) => {
                let bias = CubeBackend::float_reshape(bias, Shape::new([1, problem.n]));
                CubeBackend::float_add(out, bias)
            }
            None => out,
        });
    }
    let out = empty(&x, Shape::new([problem.m, problem.n]), x.dtype);
    let operands = FloatOperands {
        x: x.into_buffer_arg(),
        weight: weight.into_buffer_arg(),
        bias: bias.map(buffer),
        out: out.clone().into_buffer_arg(),
    };
    float::launch(&client, &problem, kernel, operands)?;
    Ok(out)
}

/// Multiplies the norm of rows [M, K] by a float weight [K, N], and adds a bias `[N]`. Returns the
/// output, the norm and the sum of the activations and the residual stream. Runs one launch for
/// one row on cards with tensor cores.
pub(super) fn norm_float_linear(
    normed: Normed,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
) -> Result<(CubeTensor, CubeTensor, CubeTensor), KernelError> {
    let Normed {
        x,
        residual,
        norm,
        epsilon,
    } = normed;
    let (problem, kernel) = float_plan(&x, &weight);
    if kernel != Kernel::FloatGemv {
        let (normalised, sum) = CubeBackend::decode_add_rms_norm(x, residual, norm, epsilon);
        let out = float_linear(normalised.clone(), weight, bias)?;
        return Ok((out, normalised, sum));
    }
    let client = x.client.clone();
    let out = empty(&x, Shape::new([1, problem.n]), x.dtype);
    let (normalised, sum) = (empty(&x, x.shape(), x.dtype), empty(&x, x.shape(), x.dtype));
    let [x, residual, norm] = [x, residual, norm].map(|tensor| aligned(tensor).into_buffer_arg());
    let norm = FloatNorm {
        residual,
        weight: norm,
        sum: sum.clone().into_buffer_arg(),
        normalised: normalised.clone().into_buffer_arg(),
        epsilon: epsilon as f32,
    };
    let operands = FloatOperands {
        x,
        weight: weight.into_buffer_arg(),
        bias: bias.map(buffer),
        out: out.clone().into_buffer_arg(),
    };
    float_gemv::launch(&client, &problem, Some(norm), operands)?;
    Ok((out, normalised, sum))
}

/// Returns the problem of a float weight, and the kernel for it: that of the plan if the weight is
/// the transpose of an aligned contiguous tensor, otherwise [`Kernel::FloatMatmul`].
fn float_plan(x: &CubeTensor, weight: &CubeTensor) -> (FloatProblem, Kernel) {
    let [k, n] = weight.shape().dims();
    let problem = FloatProblem {
        m: x.shape().num_elements() / k.max(1),
        k,
        n,
        dtype: dtype_of(x),
    };
    let is_table = **weight.meta.strides() == [1, k] && is_aligned(weight);
    let kernel = match plan(problem, &Target::of(&x.client)).kernel {
        kernel @ (Kernel::FloatGemv | Kernel::LmHead(_) | Kernel::FewColumns) if is_table => kernel,
        _ => Kernel::FloatMatmul,
    };
    (problem, kernel)
}

/// Multiplies `x` [M, K] with `weight` [K, N], without autotuning: by [`tma::matmul`] on cards that
/// have the tensor memory accelerator, otherwise as
/// [`decode_matmul`](DecodeBackend::decode_matmul).
fn many_rows(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let has_tma = Target::of(&x.client).capability() >= TMA_CAPABILITY && x.dtype.size() == 2;
    has_tma
        .then(|| tma::matmul(&x, &weight, x.dtype))
        .flatten()
        .unwrap_or_else(|| CubeBackend::decode_matmul(x, weight))
}
