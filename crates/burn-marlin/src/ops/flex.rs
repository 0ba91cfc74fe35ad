//! The op on Burn's Flex backend: Rust on the CPU.

use super::{OptionalFloat, OptionalInt, W4A16Backend, W4A16Weight, activation_dtype, dequantize_adapted, linear_shape};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, TensorData};
use half::{bf16, f16};
use marlin_kernels::host::{self, HostWeight};
use marlin_kernels::{ActivationDtype, Kernel, KernelError, Problem, Target, WeightLayout, select};

impl W4A16Backend for Flex {
    fn w4a16_linear(x: FloatTensor<Self>, weight: W4A16Weight<Self>, bias: OptionalFloat<Self>) -> FloatTensor<Self> {
        let (k, n, dtype) = (weight.k, weight.n, x.dtype());
        let shape = linear_shape(&x.shape(), n);
        let m = x.shape().num_elements() / k;
        let problem = weight_problem(&weight, m, dtype);
        if select(&problem, WeightLayout::Plain, &Target::flex()).kernel == Kernel::Host {
            let bias = bias.into_option().map(floats);
            let out = HostTensors::new(weight).run(|weight| host::matmul(&problem, &floats(x), weight, bias.as_deref()));
            return tensor(out, shape, dtype);
        }
        let x = Self::float_reshape(x, Shape::new([m, k]));
        let mut out = Self::float_matmul(x, Self::w4a16_dequantize(weight, dtype.into()));
        if let Some(bias) = bias.into_option() {
            out = Self::float_add(out, Self::float_reshape(bias, Shape::new([1, n])));
        }
        Self::float_reshape(out, shape)
    }

    fn w4a16_dequantize(weight: W4A16Weight<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let shape = Shape::new([weight.k, weight.n]);
        let problem = weight_problem(&weight, 0, dtype.into());
        let values = HostTensors::new(weight).run(|weight| host::dequantize(&problem, weight));
        tensor(values, shape, dtype.into())
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
        assert!(layout == weight.layout, "W4A16: Flex holds weights in the plain layout alone, asked for {layout}");
        W4A16Weight { row_permutation: OptionalInt::Absent, ..weight }
    }
}

fn weight_problem(weight: &W4A16Weight<Flex>, m: usize, dtype: DType) -> Problem {
    // Any other dtype is refused before the op; f32 serves it all the same.
    let activations = activation_dtype(dtype).unwrap_or(ActivationDtype::F32);
    weight.problem(m, activations, ActivationDtype::F32)
}

/// The tensors of a weight as the host kernels take them.
struct HostTensors {
    words: IntTensor<Flex>,
    scales: Vec<f32>,
    zero_points: Option<IntTensor<Flex>>,
    row_permutation: Option<IntTensor<Flex>>,
}

impl HostTensors {
    fn new(weight: W4A16Weight<Flex>) -> Self {
        Self {
            // Already contiguous, a tensor is taken as it is: nothing is copied but the scales.
            words: weight.words.to_contiguous(),
            scales: floats(weight.scales),
            zero_points: weight.zero_points.into_option().map(|zeros| zeros.to_contiguous()),
            row_permutation: weight.row_permutation.into_option().map(|rows| rows.to_contiguous()),
        }
    }

    /// Backend operations have no way to return an error; everything a user can cause was checked before the op.
    fn run(&self, kernel: impl FnOnce(HostWeight<'_>) -> Result<Vec<f32>, KernelError>) -> Vec<f32> {
        let weight = HostWeight {
            words: words(&self.words),
            scales: &self.scales,
            zero_points: self.zero_points.as_ref().map(words),
            row_permutation: self.row_permutation.as_ref().map(words),
        };
        kernel(weight).unwrap_or_else(|error| panic!("W4A16 kernel refused: {error}"))
    }
}

/// The bits of a contiguous i32 tensor.
fn words(tensor: &IntTensor<Flex>) -> &[u32] {
    bytemuck::cast_slice(tensor.storage::<i32>())
}

/// The values of a float tensor, contiguous, as f32.
fn floats(tensor: FloatTensor<Flex>) -> Vec<f32> {
    let tensor = tensor.to_contiguous();
    match tensor.dtype() {
        DType::F16 => tensor.storage::<f16>().iter().map(|value| value.to_f32()).collect(),
        DType::BF16 => tensor.storage::<bf16>().iter().map(|value| value.to_f32()).collect(),
        _ => tensor.storage::<f32>().to_vec(),
    }
}

fn tensor(values: Vec<f32>, shape: Shape, dtype: DType) -> FloatTensor<Flex> {
    FloatTensor::<Flex>::from_data(TensorData::new(values, shape).convert_dtype(dtype))
}
