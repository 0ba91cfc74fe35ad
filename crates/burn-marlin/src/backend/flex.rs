//! The operations on Burn's Flex backend, which runs Rust code on the CPU.

use super::pool::Pooled;
use super::{
    OptionalFloat, QuantBackend, QuantTensors, activation_dtype, dequantize_adapted, linear_shape,
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, TensorData};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use marlin_format::{Sparsity, WeightDescriptor, WeightTensors, expand_two_four};
use marlin_kernels::matmul::host::{self, Floats, FloatsMut, HostWeight};
use marlin_kernels::{ActivationDtype, KernelError, QuantProblem};
use std::borrow::Cow;

/// The tensor type of Flex, the same for every kind of tensor.
type FlexTensor = FloatTensor<Flex>;

impl QuantBackend for Flex {
    fn quant_linear(
        x: FloatTensor<Self>,
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        bias: OptionalFloat<Self>,
    ) -> FloatTensor<Self> {
        let (shape, dtype) = (linear_shape(&x.shape(), descriptor.n), x.dtype());
        let problem = weight_problem(
            &weight,
            &descriptor,
            x.shape().num_elements() / descriptor.k,
            dtype,
        );
        let (x, bias) = (
            x.to_contiguous(),
            bias.into_option().map(|bias| bias.to_contiguous()),
        );
        let bias = bias.as_ref().map(to_f32);
        let out = with_host_weight(weight.into(), |weight| {
            host::matmul(&problem, &to_f32(&x), weight, bias.as_deref())
        });
        from_f32(out, shape, dtype)
    }

    fn quant_dequantize(
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let WeightDescriptor { k, n, .. } = descriptor;
        let problem = weight_problem(&weight, &descriptor, 0, dtype.into());
        let (mut buffer, dtype) = match dtype {
            FloatDType::F16 => (Pooled::new::<f16>(k * n), DType::F16),
            FloatDType::BF16 => (Pooled::new::<bf16>(k * n), DType::BF16),
            _ => (Pooled::new::<f32>(k * n), DType::F32),
        };
        let out = match dtype {
            DType::F16 => FloatsMut::F16(buffer.elements()),
            DType::BF16 => FloatsMut::BF16(buffer.elements()),
            _ => FloatsMut::F32(buffer.elements()),
        };
        with_host_weight(weight.into(), |weight| {
            host::dequantize(&problem, weight, out)
        });
        FloatTensor::<Self>::from_data(TensorData::from_bytes(
            buffer.into_bytes(),
            Shape::new([k, n]),
            dtype,
        ))
    }

    fn quant_dequantize_adapted(
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        dequantize_adapted(weight, descriptor, a, b, scale, dtype)
    }

    fn quant_repack(
        weight: QuantTensors<Self>,
        descriptor: WeightDescriptor,
        to: WeightDescriptor,
    ) -> QuantTensors<Self> {
        assert!(
            to.layout == descriptor.layout,
            "Flex holds weights in the plain layout only, asked for {}",
            to.layout
        );
        let weight = QuantTensors {
            row_permutation: super::OptionalInt::Absent,
            ..weight
        };
        if to.format.sparsity == descriptor.format.sparsity {
            weight
        } else {
            expanded(weight, &descriptor)
        }
    }
}

/// Expands a 2:4 weight to a dense one.
fn expanded(weight: QuantTensors<Flex>, descriptor: &WeightDescriptor) -> QuantTensors<Flex> {
    let weight = WeightTensors::from(weight).map(|_, tensor: FlexTensor| tensor.to_contiguous());
    let zero_points = weight.zero_points.as_ref().map(words);
    let dense = expand_two_four(
        descriptor,
        words(&weight.qweight),
        weight.metadata.as_ref().map(words).unwrap_or_default(),
        zero_points,
    );
    let shape = descriptor
        .with_sparsity(Sparsity::Dense)
        .tensors()
        .qweight
        .matrix_shape();
    let qweight = FloatTensor::<Flex>::from_data(TensorData::new(
        bytemuck::cast_vec::<u32, i32>(dense),
        shape,
    ));
    WeightTensors {
        qweight,
        metadata: None,
        ..weight
    }
    .into()
}

pub(super) fn weight_problem(
    weight: &QuantTensors<Flex>,
    descriptor: &WeightDescriptor,
    m: usize,
    dtype: DType,
) -> QuantProblem {
    // Other dtypes are refused before the operation; f32 is only a fallback.
    let dtype_of = |dtype| activation_dtype(dtype).unwrap_or(ActivationDtype::F32);
    QuantProblem::new(m, *descriptor, dtype_of(dtype)).with_scales(dtype_of(weight.scales.dtype()))
}

/// Runs a kernel on the memory of a weight's tensors.
///
/// # Panics
/// Panics if the kernel returns an error, see [`computed`].
pub(super) fn with_host_weight<R>(
    weight: WeightTensors<FlexTensor>,
    kernel: impl FnOnce(HostWeight<'_>) -> Result<R, KernelError>,
) -> R {
    // A tensor that is already contiguous is not copied.
    let weight = weight.map(|_, tensor| tensor.to_contiguous());
    let host = HostWeight {
        words: words(&weight.qweight),
        scales: stored(&weight.scales),
        zero_points: weight.zero_points.as_ref().map(words),
        row_permutation: weight.row_permutation.as_ref().map(words),
    };
    computed(kernel(host))
}

/// Unwraps the result of a host kernel.
///
/// # Panics
/// Panics if the kernel returned an error: backend operations have no way to return an error, and
/// user errors are checked before the operation.
pub(super) fn computed<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("host kernel refused: {error}"))
}

/// Returns the bits of a contiguous i32 tensor, as u32 words.
fn words(tensor: &FlexTensor) -> &[u32] {
    bytemuck::cast_slice(tensor.storage::<i32>())
}

/// Returns the values of a contiguous float tensor.
pub fn stored(tensor: &FloatTensor<Flex>) -> Floats<'_> {
    match tensor.dtype() {
        DType::F16 => Floats::F16(tensor.storage()),
        DType::BF16 => Floats::BF16(tensor.storage()),
        _ => Floats::F32(tensor.storage()),
    }
}

/// Returns the values of a contiguous float tensor as f32.
pub fn to_f32(tensor: &FloatTensor<Flex>) -> Cow<'_, [f32]> {
    match stored(tensor) {
        Floats::F32(values) => Cow::Borrowed(values),
        Floats::F16(values) => Cow::Owned(values.to_f32_vec()),
        Floats::BF16(values) => Cow::Owned(values.to_f32_vec()),
    }
}

/// Returns a tensor of `values` rounded to `dtype`.
pub fn from_f32(values: Vec<f32>, shape: Shape, dtype: DType) -> FloatTensor<Flex> {
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
