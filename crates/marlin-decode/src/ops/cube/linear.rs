//! Linear layers: of a quantised weight after a norm, and of a float weight for many rows.

use super::aligned;
use crate::ops::DecodeBackend;
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_marlin::backend::cube::{buffer, empty, launch_linear, weight_buffers, weight_problem};
use burn_marlin::backend::linear_shape;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::matmul::routine::BlueprintStrategy;
use cubek::std::InputBinding;
use marlin_format::{WeightDescriptor, WeightTensors};
use marlin_kernels::{
    Epilogue, EpilogueStage, KernelError, NormOperands, Operands, Prologue, PrologueStage, Target,
    plan,
};

/// The compute capability from which on cards have the tensor memory accelerator.
const TMA_CAPABILITY: u32 = 90;

/// The activations of a linear layer: the norm of `x + residual`.
pub(super) struct Normed {
    pub x: CubeTensor,
    pub residual: CubeTensor,
    pub norm: CubeTensor,
    pub epsilon: f64,
}

/// Runs one launch if the plan computes norm and epilogue in the matmul's kernel; otherwise the
/// norm before it, and the epilogue after it.
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
        return Ok((CubeBackend::decode_silu_mul(out), sum));
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

/// `x` [M, K] times `weight` [K, N], without autotuning: on the kernel of Burn's that was the
/// fastest of 15 on an H200, Llama 2 7B in f16: 15.6 ms for a prompt of 64 tokens, 62 for 1024; the
/// one of [`decode_matmul`](DecodeBackend::decode_matmul), which needs no copies by the tensor
/// memory accelerator, takes 49.6 and 221.
pub(super) fn many_rows(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let client = x.client.clone();
    if Target::of(&client)
        .card
        .is_none_or(|card| card.capability < TMA_CAPABILITY)
        || x.dtype.size() != 2
    {
        return CubeBackend::decode_matmul(x, weight);
    }
    let ([m, _], [_, n]) = (x.shape().dims(), weight.shape().dims());
    let (out, elem) = (
        empty(&x, Shape::new([m, n]), x.dtype),
        dtype_to_storage_type(x.dtype),
    );
    let input = |tensor: &CubeTensor| InputBinding::new(tensor.clone().binding(), elem);
    let mut dtypes = MatmulElems::from_globals(&MatmulGlobalElems {
        lhs: elem,
        rhs: elem,
        out: elem,
    });
    let strategy = Strategy::SpecializedTmaMma(BlueprintStrategy::Inferred(().into()));
    match launch_ref(
        &strategy.into(),
        &client,
        input(&x),
        input(&weight),
        out.clone().binding(),
        &mut dtypes,
    ) {
        Ok(()) => out,
        Err(error) => {
            tracing::debug!(?error, m, n, "Burn chooses another matmul");
            CubeBackend::decode_matmul(x, weight)
        }
    }
}
