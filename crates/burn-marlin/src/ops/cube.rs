//! The op on every CubeCL runtime.

use super::{OptionalFloat, W4A16Backend, W4A16Weight, activation_dtype, linear_shape};
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use marlin_kernels::portable::{self, DequantizeArgs, MatmulArgs, WeightArgs};
use marlin_kernels::{Kernel, KernelError, Problem, Target, select};

impl W4A16Backend for CubeBackend {
    fn w4a16_linear(x: FloatTensor<Self>, weight: W4A16Weight<Self>, bias: OptionalFloat<Self>) -> FloatTensor<Self> {
        let shape = linear_shape(&x.shape(), weight.n);
        launched(launch_linear(x, weight, bias.into_option(), shape))
    }

    fn w4a16_dequantize(weight: W4A16Weight<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        crate::fusion::count_dequantized();
        launched(launch_dequantize(weight, dtype.into()))
    }
}

/// Backend operations have no way to return an error; everything a user can cause was checked before the op.
fn launched(result: Result<CubeTensor, KernelError>) -> CubeTensor {
    result.unwrap_or_else(|error| panic!("W4A16 launch refused: {error}"))
}

/// Multiplies and adds the bias: x [.., K] to `out_shape` [.., N]. The fused operation calls this too.
pub(crate) fn launch_linear(
    x: CubeTensor,
    weight: W4A16Weight<CubeBackend>,
    bias: Option<CubeTensor>,
    out_shape: Shape,
) -> Result<CubeTensor, KernelError> {
    let x = into_contiguous(x);
    let m = x.shape().num_elements() / weight.k;
    let problem = weight_problem(&weight, m, x.dtype)?;
    let out = empty_device_contiguous_dtype(x.client.clone(), x.device.clone(), out_shape, x.dtype);
    let client = x.client.clone();
    match select(&problem, &Target::of(&client)).kernel {
        Kernel::Portable { rows } => {
            let args = MatmulArgs {
                x: x.into_buffer_arg(),
                weight: weight_args(weight),
                bias: bias.map(|bias| into_contiguous(bias).into_buffer_arg()),
                out: out.clone().into_buffer_arg(),
            };
            portable::matmul(&client, &problem, rows, args)?;
        }
        // Plans of Flex; `select` gives none of them to a CubeCL runtime.
        kernel @ (Kernel::Host | Kernel::DequantizeThenMatmul) => {
            return Err(KernelError::NotLaunchable { kernel, runtime: Target::of(&client).runtime });
        }
    }
    Ok(out)
}

fn launch_dequantize(weight: W4A16Weight<CubeBackend>, dtype: DType) -> Result<CubeTensor, KernelError> {
    let problem = weight_problem(&weight, 0, dtype)?;
    let words = &weight.words;
    let out = empty_device_contiguous_dtype(words.client.clone(), words.device.clone(), Shape::new([weight.k, weight.n]), dtype);
    let client = words.client.clone();
    portable::dequantize(&client, &problem, DequantizeArgs { weight: weight_args(weight), out: out.clone().into_buffer_arg() })?;
    Ok(out)
}

fn weight_problem(weight: &W4A16Weight<CubeBackend>, m: usize, dtype: DType) -> Result<Problem, KernelError> {
    let of = |dtype: DType, client: &Client| {
        activation_dtype(dtype).ok_or_else(|| KernelError::Dtype { runtime: Target::of(client).runtime, dtype: dtype.name() })
    };
    let client = &weight.words.client;
    Ok(weight.problem(m, of(dtype, client)?, of(weight.scales.dtype, client)?))
}

fn weight_args(weight: W4A16Weight<CubeBackend>) -> WeightArgs {
    let buffer = |tensor: CubeTensor| into_contiguous(tensor).into_buffer_arg();
    WeightArgs {
        words: buffer(weight.words),
        scales: buffer(weight.scales),
        zero_points: weight.zero_points.into_option().map(buffer),
        row_permutation: weight.row_permutation.into_option().map(buffer),
    }
}
