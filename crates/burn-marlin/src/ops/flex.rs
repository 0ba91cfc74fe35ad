//! The op on Burn's Flex backend: Rust on the CPU.

use super::pool::Pooled;
use super::{OptionalFloat, W4A16Backend, W4A16Weight, activation_dtype, dequantize_adapted, linear_shape};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, TensorData};
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use marlin_kernels::host::{self, Floats, HostFloat, HostWeight};
use marlin_kernels::{ActivationDtype, KernelError, Problem, WeightLayout};
use std::borrow::Cow;

impl W4A16Backend for Flex {
    fn w4a16_linear(x: FloatTensor<Self>, weight: W4A16Weight<Self>, bias: OptionalFloat<Self>) -> FloatTensor<Self> {
        let (k, n, dtype) = (weight.k, weight.n, x.dtype());
        let shape = linear_shape(&x.shape(), n);
        let problem = weight_problem(&weight, x.shape().num_elements() / k, dtype);
        let (x, bias) = (x.to_contiguous(), bias.into_option().map(|bias| bias.to_contiguous()));
        let bias = bias.as_ref().map(to_f32);
        let out = HostTensors::new(weight).run(|weight| host::matmul(&problem, &to_f32(&x), weight, bias.as_deref()));
        from_f32(out, shape, dtype)
    }

    fn w4a16_dequantize(weight: W4A16Weight<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        match dtype {
            FloatDType::F16 => dequantize::<f16>(weight, DType::F16),
            FloatDType::BF16 => dequantize::<bf16>(weight, DType::BF16),
            _ => dequantize::<f32>(weight, DType::F32),
        }
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
        W4A16Weight { row_permutation: super::OptionalInt::Absent, ..weight }
    }
}

fn dequantize<T: HostFloat + Pod>(weight: W4A16Weight<Flex>, dtype: DType) -> FloatTensor<Flex> {
    let shape = Shape::new([weight.k, weight.n]);
    let problem = weight_problem(&weight, 0, dtype);
    let mut buffer = Pooled::new::<T>(weight.k * weight.n);
    HostTensors::new(weight).run(|weight| host::dequantize::<T>(&problem, weight, buffer.elements()));
    FloatTensor::<Flex>::from_data(TensorData::from_bytes(buffer.into_bytes(), shape, dtype))
}

fn weight_problem(weight: &W4A16Weight<Flex>, m: usize, dtype: DType) -> Problem {
    // Any other dtype is refused before the op; f32 serves it all the same.
    let dtype_of = |dtype| activation_dtype(dtype).unwrap_or(ActivationDtype::F32);
    weight.problem(m, dtype_of(dtype), dtype_of(weight.scales.dtype()))
}

/// The tensors of a weight as the host kernels take them.
struct HostTensors {
    words: IntTensor<Flex>,
    scales: FloatTensor<Flex>,
    zero_points: Option<IntTensor<Flex>>,
    row_permutation: Option<IntTensor<Flex>>,
}

impl HostTensors {
    fn new(weight: W4A16Weight<Flex>) -> Self {
        Self {
            // Already contiguous, a tensor is taken as it is: nothing is copied.
            words: weight.words.to_contiguous(),
            scales: weight.scales.to_contiguous(),
            zero_points: weight.zero_points.into_option().map(|zeros| zeros.to_contiguous()),
            row_permutation: weight.row_permutation.into_option().map(|rows| rows.to_contiguous()),
        }
    }

    /// Backend operations have no way to return an error; everything a user can cause was checked before the op.
    fn run<R>(&self, kernel: impl FnOnce(HostWeight<'_>) -> Result<R, KernelError>) -> R {
        let weight = HostWeight {
            words: words(&self.words),
            scales: stored(&self.scales),
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

/// The values of a contiguous float tensor.
pub(crate) fn stored(tensor: &FloatTensor<Flex>) -> Floats<'_> {
    match tensor.dtype() {
        DType::F16 => Floats::F16(tensor.storage()),
        DType::BF16 => Floats::BF16(tensor.storage()),
        _ => Floats::F32(tensor.storage()),
    }
}

/// The values of a contiguous float tensor as f32.
pub(crate) fn to_f32(tensor: &FloatTensor<Flex>) -> Cow<'_, [f32]> {
    match stored(tensor) {
        Floats::F32(values) => Cow::Borrowed(values),
        Floats::F16(values) => Cow::Owned(values.to_f32_vec()),
        Floats::BF16(values) => Cow::Owned(values.to_f32_vec()),
    }
}

/// A tensor of values, rounded to a dtype.
pub(crate) fn from_f32(values: Vec<f32>, shape: Shape, dtype: DType) -> FloatTensor<Flex> {
    let data = match dtype {
        DType::F16 => {
            let mut rounded = vec![f16::ZERO; values.len()];
            rounded.convert_from_f32_slice(&values);
            TensorData::new(rounded, shape)
        }
        DType::BF16 => {
            let mut rounded = vec![bf16::ZERO; values.len()];
            rounded.convert_from_f32_slice(&values);
            TensorData::new(rounded, shape)
        }
        _ => TensorData::new(values, shape),
    };
    FloatTensor::<Flex>::from_data(data)
}
