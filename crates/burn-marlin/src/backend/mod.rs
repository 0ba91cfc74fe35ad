//! The operations on quantised weights as a Burn backend extension: one trait, implemented for
//! every CubeCL runtime, for Flex, and for Autodiff.
//!
//! This module is for crates that add their own operations on
//! [`QuantizedWeight`](crate::QuantizedWeight)s. Models use that type and
//! [`QuantLinear`](crate::QuantLinear).

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cubecl-runtime")]
pub mod cube;
pub mod experts;
#[cfg(feature = "flex")]
pub mod flex;
#[cfg(feature = "flex")]
mod pool;
#[cfg(feature = "cubecl-runtime")]
pub mod tma;

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
use burn::tensor::{DType, FloatDType, Shape};
use marlin_format::{TensorDescriptor, WeightDescriptor, WeightTensors};
use marlin_kernels::ActivationDtype;

/// The name of the dequantise operation in a fusion stream.
#[cfg(feature = "cubecl-runtime")]
pub(crate) const DEQUANTIZE: &str = "quant_dequantize";

/// An integer tensor that a weight format may lack.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion)]
pub enum OptionalInt<B: Backend> {
    /// The format has the tensor.
    Present(IntTensor<B>),
    /// The format does not have the tensor.
    Absent,
}

impl<B: Backend> OptionalInt<B> {
    /// Returns the tensor, or `None` if it is absent.
    pub fn into_option(self) -> Option<IntTensor<B>> {
        match self {
            Self::Present(tensor) => Some(tensor),
            Self::Absent => None,
        }
    }
}

impl<B: Backend> From<Option<IntTensor<B>>> for OptionalInt<B> {
    fn from(tensor: Option<IntTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }
}

/// A float tensor that a layer may lack.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion)]
pub enum OptionalFloat<B: Backend> {
    /// The layer has the tensor.
    Present(FloatTensor<B>),
    /// The layer does not have the tensor.
    Absent,
}

impl<B: Backend> OptionalFloat<B> {
    /// Returns the tensor, or `None` if it is absent.
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Present(tensor) => Some(tensor),
            Self::Absent => None,
        }
    }
}

impl<B: Backend> From<Option<FloatTensor<B>>> for OptionalFloat<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }
}

/// The tensors of a quantised weight on one backend, as its [`WeightDescriptor`] lists them. Words
/// are held as i32.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion)]
pub struct QuantTensors<B: Backend> {
    /// The packed values.
    pub qweight: IntTensor<B>,
    /// The positions of the values kept in a 2:4 weight.
    #[extension_type]
    pub metadata: OptionalInt<B>,
    /// The scales, in f16, bf16 or f32.
    pub scales: FloatTensor<B>,
    /// The packed zero points.
    #[extension_type]
    pub zero_points: OptionalInt<B>,
    /// The natural row index of each stored row.
    #[extension_type]
    pub row_permutation: OptionalInt<B>,
}

impl<T, B: Backend<FloatTensorPrimitive = T, IntTensorPrimitive = T>> From<QuantTensors<B>>
    for WeightTensors<T>
{
    fn from(tensors: QuantTensors<B>) -> Self {
        let QuantTensors {
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        } = tensors;
        let [metadata, zero_points, row_permutation] =
            [metadata, zero_points, row_permutation].map(OptionalInt::into_option);
        Self {
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        }
    }
}

impl<T, B: Backend<FloatTensorPrimitive = T, IntTensorPrimitive = T>> From<WeightTensors<T>>
    for QuantTensors<B>
{
    fn from(tensors: WeightTensors<T>) -> Self {
        let WeightTensors {
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        } = tensors;
        let [metadata, zero_points, row_permutation] =
            [metadata, zero_points, row_permutation].map(OptionalInt::from);
        Self {
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        }
    }
}

/// The operations on quantised weights that a backend implements.
///
/// Shapes and dtypes are checked by [`QuantizedWeight`](crate::QuantizedWeight) and
/// [`QuantLinear`](crate::QuantLinear); backends do not check them again. A descriptor passes
/// through fusion as [`WeightFormat::to_code`](marlin_format::WeightFormat::to_code).
#[backend_extension(
    Cube: cfg(feature = "cubecl-runtime"),
    Flex: cfg(feature = "flex"),
    Fusion,
    Autodiff: cfg(feature = "autodiff")
)]
pub trait QuantBackend: Backend {
    /// Multiplies activations [.., K] with the weight [K, N] and adds a bias `[N]` in the
    /// activations' dtype. The result [.., N] has that dtype; sums are accumulated in f32.
    #[fusion(meta = linear_spec)]
    fn quant_linear(
        x: FloatTensor<Self>,
        #[extension_type] weight: QuantTensors<Self>,
        #[fusion(scalar = weight_code(&descriptor))] descriptor: WeightDescriptor,
        #[extension_type] bias: OptionalFloat<Self>,
    ) -> FloatTensor<Self>;

    /// Returns the float weight [K, N] in natural row order.
    #[fusion(meta = dequantize_spec)]
    fn quant_dequantize(
        #[extension_type] weight: QuantTensors<Self>,
        #[fusion(scalar = weight_code(&descriptor))] descriptor: WeightDescriptor,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// Returns the float weight [K, N] in natural row order plus `scale * a b`, where `a` [K, R]
    /// and `b` [R, N] are the factors of a LoRA adapter in `dtype`.
    #[fusion(meta = adapted_spec)]
    fn quant_dequantize_adapted(
        #[extension_type] weight: QuantTensors<Self>,
        #[fusion(scalar = weight_code(&descriptor))] descriptor: WeightDescriptor,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// Converts the weight to the descriptor `to`: to another layout, or from 2:4 to dense. A row
    /// permutation is the same in every layout and is not returned.
    ///
    /// # Panics
    /// Panics if the backend has no kernel that reads the layout; [`marlin_kernels::device_layout`]
    /// never selects such a layout.
    #[fusion(meta = repack_spec)]
    fn quant_repack(
        #[extension_type] weight: QuantTensors<Self>,
        #[fusion(scalar = weight_code(&descriptor))] descriptor: WeightDescriptor,
        to: WeightDescriptor,
    ) -> QuantTensors<Self>;
}

/// Encodes a descriptor as the scalar that passes through fusion. K and N come from the output's
/// shape.
fn weight_code(descriptor: &WeightDescriptor) -> u64 {
    descriptor.format.to_code(descriptor.layout)
}

fn linear_spec(
    x: &TensorSpec,
    _weight: &QuantTensorsMetadata,
    descriptor: &WeightDescriptor,
    _bias: &OptionalFloatMetadata,
) -> TensorSpec {
    TensorSpec::new(linear_shape(&x.shape, descriptor.n), x.dtype)
}

fn dequantize_spec(
    _weight: &QuantTensorsMetadata,
    descriptor: &WeightDescriptor,
    dtype: &FloatDType,
) -> TensorSpec {
    TensorSpec::new(Shape::new([descriptor.k, descriptor.n]), (*dtype).into())
}

fn adapted_spec(
    weight: &QuantTensorsMetadata,
    descriptor: &WeightDescriptor,
    _a: &TensorSpec,
    _b: &TensorSpec,
    _scale: &f64,
    dtype: &FloatDType,
) -> TensorSpec {
    dequantize_spec(weight, descriptor, dtype)
}

/// Implements [`QuantBackend::quant_dequantize_adapted`] for the backends that compute: CubeCL and
/// Flex.
fn dequantize_adapted<B: QuantBackend>(
    weight: QuantTensors<B>,
    descriptor: WeightDescriptor,
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    scale: f64,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let added = B::float_mul_scalar(B::float_matmul(a, b), scale.into());
    B::float_add(B::quant_dequantize(weight, descriptor, dtype), added)
}

fn repack_spec(
    weight: &QuantTensorsMetadata,
    _descriptor: &WeightDescriptor,
    to: &WeightDescriptor,
) -> QuantTensorsMetadata {
    let shapes = to.tensors();
    let spec_of = |shape: TensorDescriptor, tensor: &TensorSpec| {
        TensorSpec::new(Shape::from(shape.shape().to_vec()), tensor.dtype)
    };
    let optional =
        |shape: Option<TensorDescriptor>, tensor: &OptionalIntMetadata| match (tensor, shape) {
            (OptionalIntMetadata::Present(tensor), Some(shape)) => {
                OptionalIntMetadata::Present(spec_of(shape, tensor))
            }
            _ => OptionalIntMetadata::Absent,
        };
    QuantTensorsMetadata {
        qweight: spec_of(shapes.qweight, &weight.qweight),
        metadata: optional(shapes.metadata, &weight.metadata),
        scales: spec_of(shapes.scales, &weight.scales),
        zero_points: optional(shapes.zero_points, &weight.zero_points),
        row_permutation: OptionalIntMetadata::Absent,
    }
}

/// Returns the shape [.., N] of the output for activations of the shape `x`, [.., K].
pub fn linear_shape(x: &Shape, n: usize) -> Shape {
    let mut shape = x.clone();
    if let Some(last) = shape.rank().checked_sub(1) {
        shape[last] = n;
    }
    shape
}

/// Converts an activation dtype to Burn's float dtype.
pub fn float_dtype(dtype: ActivationDtype) -> FloatDType {
    match dtype {
        ActivationDtype::F16 => FloatDType::F16,
        ActivationDtype::BF16 => FloatDType::BF16,
        ActivationDtype::F32 => FloatDType::F32,
    }
}

/// Converts Burn's dtype to an activation dtype; `None` for dtypes that no kernel takes.
pub fn activation_dtype(dtype: DType) -> Option<ActivationDtype> {
    match dtype {
        DType::F32 => Some(ActivationDtype::F32),
        DType::F16 => Some(ActivationDtype::F16),
        DType::BF16 => Some(ActivationDtype::BF16),
        _ => None,
    }
}
