//! The op on every CubeCL runtime.

use super::workspace::workspace;
use super::{OptionalFloat, OptionalInt, W4A16Backend, W4A16Weight, activation_dtype, dequantize_adapted, linear_shape};
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use marlin_kernels::marlin::{self, Card, Launch};
use marlin_kernels::portable::{self, DequantizeArgs, WeightArgs};
use marlin_kernels::{Kernel, KernelError, Problem, Target, WeightLayout, repack, select};

impl W4A16Backend for CubeBackend {
    fn w4a16_linear(x: FloatTensor<Self>, weight: W4A16Weight<Self>, bias: OptionalFloat<Self>) -> FloatTensor<Self> {
        let shape = linear_shape(&x.shape(), weight.n);
        launched(launch_linear(x, weight, bias.into_option(), shape))
    }

    fn w4a16_dequantize(weight: W4A16Weight<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        crate::fusion::count_dequantized();
        launched(launch_dequantize(weight, dtype.into()))
    }

    fn w4a16_dequantize_adapted(
        weight: W4A16Weight<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        dequantize_adapted(weight, a, b, scale, dtype)
    }

    fn w4a16_relayout(weight: W4A16Weight<Self>, layout: WeightLayout) -> W4A16Weight<Self> {
        launched(launch_relayout(weight, layout))
    }
}

/// Backend operations have no way to return an error; everything a user can cause was checked before the op.
pub(crate) fn launched<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("launch refused: {error}"))
}

/// Whether kernels that read 16 bytes at a time can read a tensor where it is: a view into another tensor may start anywhere.
pub(crate) fn is_aligned(tensor: &CubeTensor) -> bool {
    tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16)
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
    let bias = bias.map(into_contiguous);
    let client = x.client.clone();
    let target = Target::of(&client);
    match (select(&problem, weight.layout, &target).kernel, target.card) {
        (Kernel::Marlin(launch), Some(card)) => launch_marlin(&problem, launch, &card, x, weight, bias, &out)?,
        (Kernel::Portable { rows }, _) => {
            let args = portable::MatmulArgs {
                x: x.into_buffer_arg(),
                weight: plain_args(weight)?,
                bias: bias.map(CubeTensor::into_buffer_arg),
                out: out.clone().into_buffer_arg(),
            };
            portable::matmul(&client, &problem, rows, args)?;
        }
        // Plans of other backends; `select` gives none of them to a CubeCL runtime.
        (kernel, _) => return Err(KernelError::NotLaunchable { kernel, runtime: target.runtime }),
    }
    Ok(out)
}

/// The tensor-core kernel, on activations that are brought into the order of the stored rows where they are not.
fn launch_marlin(
    problem: &Problem,
    launch: Launch,
    card: &Card,
    x: CubeTensor,
    weight: W4A16Weight<CubeBackend>,
    bias: Option<CubeTensor>,
    out: &CubeTensor,
) -> Result<(), KernelError> {
    let (client, device) = (x.client.clone(), x.device.clone());
    let buffer = |tensor: CubeTensor| into_contiguous(tensor).into_buffer_arg();
    let row_permutation = weight.row_permutation.into_option().map(buffer);
    let row_length = marlin::row_length(problem.k);
    let x = if row_permutation.is_some() || row_length != problem.k || !is_aligned(&x) {
        let arranged = empty_device_contiguous_dtype(client.clone(), device.clone(), Shape::new([problem.m, row_length]), x.dtype);
        repack::arrange(&client, problem, x.into_buffer_arg(), row_permutation, arranged.clone().into_buffer_arg())?;
        arranged
    } else {
        x
    };
    let args = marlin::MatmulArgs {
        x: x.into_buffer_arg(),
        weight: tile_args(weight.words, weight.scales, weight.zero_points),
        bias: bias.map(CubeTensor::into_buffer_arg),
        out: out.clone().into_buffer_arg(),
        workspace: workspace(&client, &device, card),
    };
    marlin::matmul(&client, problem, launch, args)
}

/// A weight in the tile layout as the tensor-core kernels read it.
pub(crate) fn tile_args(words: CubeTensor, scales: CubeTensor, zero_points: OptionalInt<CubeBackend>) -> marlin::WeightArgs {
    let buffer = |tensor: CubeTensor| into_contiguous(tensor).into_buffer_arg();
    marlin::WeightArgs { words: buffer(words), scales: buffer(scales), zero_points: zero_points.into_option().map(buffer) }
}

fn launch_dequantize(weight: W4A16Weight<CubeBackend>, dtype: DType) -> Result<CubeTensor, KernelError> {
    let problem = weight_problem(&weight, 0, dtype)?;
    let words = &weight.words;
    let out = empty_device_contiguous_dtype(words.client.clone(), words.device.clone(), Shape::new([weight.k, weight.n]), dtype);
    let client = words.client.clone();
    portable::dequantize(&client, &problem, DequantizeArgs { weight: plain_args(weight)?, out: out.clone().into_buffer_arg() })?;
    Ok(out)
}

fn launch_relayout(weight: W4A16Weight<CubeBackend>, to: WeightLayout) -> Result<W4A16Weight<CubeBackend>, KernelError> {
    let weight = W4A16Weight { row_permutation: OptionalInt::Absent, ..weight };
    if weight.layout == to {
        return Ok(weight);
    }
    let problem = weight_problem(&weight, 0, weight.scales.dtype)?;
    let W4A16Weight { words, scales, zero_points, k, n, spec, .. } = weight;
    let client = words.client.clone();
    type Repack = fn(&Client, &Problem, WeightLayout, BufferArg, BufferArg) -> Result<(), KernelError>;
    let repacked = |tensor: CubeTensor, shape: [usize; 2], repack: Repack| {
        let out = empty_device_contiguous_dtype(client.clone(), tensor.device.clone(), Shape::new(shape), tensor.dtype);
        repack(&client, &problem, to, into_contiguous(tensor).into_buffer_arg(), out.clone().into_buffer_arg())?;
        Ok::<_, KernelError>(out)
    };
    let zero_points = zero_points.into_option();
    Ok(W4A16Weight {
        words: repacked(words, to.words(k, n, spec.bits), repack::words)?,
        scales: repacked(scales, to.scales(k, n, spec.group), repack::scales)?,
        zero_points: zero_points.map(|zeros| repacked(zeros, to.zero_points(k, n, &spec), repack::zero_points)).transpose()?.into(),
        row_permutation: OptionalInt::Absent,
        k,
        n,
        spec,
        layout: to,
    })
}

/// The problem of multiplying `m` rows of activations in a dtype with a weight.
pub(crate) fn weight_problem(weight: &W4A16Weight<CubeBackend>, m: usize, dtype: DType) -> Result<Problem, KernelError> {
    let of = |dtype: DType, client: &Client| {
        activation_dtype(dtype).ok_or_else(|| KernelError::Dtype { runtime: Target::of(client).runtime, dtype: dtype.name() })
    };
    let client = &weight.words.client;
    Ok(weight.problem(m, of(dtype, client)?, of(weight.scales.dtype, client)?))
}

/// The weight as the portable kernels read it; a weight in another layout is brought into theirs for the call.
fn plain_args(weight: W4A16Weight<CubeBackend>) -> Result<WeightArgs, KernelError> {
    let row_permutation = weight.row_permutation.clone();
    let weight = launch_relayout(weight, WeightLayout::Plain)?;
    let buffer = |tensor: CubeTensor| into_contiguous(tensor).into_buffer_arg();
    Ok(WeightArgs {
        words: buffer(weight.words),
        scales: buffer(weight.scales),
        zero_points: weight.zero_points.into_option().map(buffer),
        row_permutation: row_permutation.into_option().map(buffer),
    })
}
