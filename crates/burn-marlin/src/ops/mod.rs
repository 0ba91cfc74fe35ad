//! The W4A16 op, which serves W8A16 too, as a Burn backend extension: one trait, implemented for every CubeCL runtime, for Flex, and for Autodiff.

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cubecl-runtime")]
mod cube;
#[cfg(feature = "flex")]
pub(crate) mod flex;
#[cfg(feature = "flex")]
mod pool;
#[cfg(feature = "cubecl-runtime")]
mod workspace;

#[cfg(feature = "cubecl-runtime")]
pub(crate) use cube::{is_aligned, launch_linear, launched, tile_args, weight_problem};

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
use burn::tensor::{DType, FloatDType, Shape};
use marlin_format::QuantSpec;
use marlin_kernels::{ActivationDtype, Problem, WeightLayout};

/// Name of the dequantise operation in a fusion stream.
#[cfg(feature = "cubecl-runtime")]
pub(crate) const DEQUANTIZE: &str = "w4a16_dequantize";

/// An integer tensor that a format may do without.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion)]
pub enum OptionalInt<B: Backend> {
    /// The format has it.
    Present(IntTensor<B>),
    /// The format does without.
    Absent,
}

impl<B: Backend> OptionalInt<B> {
    pub(crate) fn into_option(self) -> Option<IntTensor<B>> {
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

/// A float tensor that a layer may do without.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion)]
pub enum OptionalFloat<B: Backend> {
    /// The layer has it.
    Present(FloatTensor<B>),
    /// The layer does without.
    Absent,
}

impl<B: Backend> OptionalFloat<B> {
    pub(crate) fn into_option(self) -> Option<FloatTensor<B>> {
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

/// A 4-bit or 8-bit weight [K, N] as tensors of one backend. Shapes are those of its [`WeightLayout`].
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion)]
pub struct W4A16Weight<B: Backend> {
    /// i32, eight weights a word, of 8 bits four.
    pub words: IntTensor<B>,
    /// In f16 or bf16, or in f32 where the device has no type for the format's.
    pub scales: FloatTensor<B>,
    /// i32, as many zero points a word. Absent where symmetric.
    #[extension_type]
    pub zero_points: OptionalInt<B>,
    /// i32 `[K]`: the natural row of each stored row. Absent where rows are in order.
    #[extension_type]
    pub row_permutation: OptionalInt<B>,
    /// Input features.
    pub k: usize,
    /// Output features.
    pub n: usize,
    /// How the weight is quantised.
    pub spec: QuantSpec,
    /// How the tensors lie.
    pub layout: WeightLayout,
}

impl<B: Backend> W4A16Weight<B> {
    /// The problem of multiplying `m` rows of activations in one dtype with this weight, whose scales are read in another.
    pub(crate) fn problem(&self, m: usize, activations: ActivationDtype, scales: ActivationDtype) -> Problem {
        let permuted = matches!(self.row_permutation, OptionalInt::Present(_));
        Problem { m, n: self.n, k: self.k, spec: self.spec, activations, scales, permuted }
    }
}

/// What every backend can do with a quantised weight.
///
/// Shapes and dtypes are checked by [`QuantizedWeight`](crate::QuantizedWeight) and [`W4A16Linear`](crate::W4A16Linear); backends assume them.
#[backend_extension(
    Cube: cfg(feature = "cubecl-runtime"),
    Flex: cfg(feature = "flex"),
    Fusion,
    Autodiff: cfg(feature = "autodiff")
)]
pub trait W4A16Backend: Backend {
    /// Activations [.., K] times the weight [K, N], plus a bias `[N]` in the activations' dtype: [.., N] in that dtype, accumulated in f32.
    #[fusion(meta = linear_spec)]
    fn w4a16_linear(
        x: FloatTensor<Self>,
        #[extension_type] weight: W4A16Weight<Self>,
        #[extension_type] bias: OptionalFloat<Self>,
    ) -> FloatTensor<Self>;

    /// The float weight [K, N] in natural row order.
    #[fusion(meta = dequantize_spec)]
    fn w4a16_dequantize(#[extension_type] weight: W4A16Weight<Self>, dtype: FloatDType) -> FloatTensor<Self>;

    /// The float weight [K, N] in natural row order plus `scale * a b`, of a LoRA adapter's factors [K, R] and [R, N] in that dtype.
    #[fusion(meta = adapted_spec)]
    fn w4a16_dequantize_adapted(
        #[extension_type] weight: W4A16Weight<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scale: f64,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// The weight in a layout. It comes without its row permutation, which is the same in every layout.
    ///
    /// # Panics
    /// Where the backend has no kernel that reads the layout; [`marlin_kernels::layout_for`] never asks for it there.
    #[fusion(meta = relayout_spec)]
    fn w4a16_relayout(#[extension_type] weight: W4A16Weight<Self>, layout: WeightLayout) -> W4A16Weight<Self>;
}

fn linear_spec(x: &TensorSpec, weight: &W4A16WeightMetadata, _bias: &OptionalFloatMetadata) -> TensorSpec {
    TensorSpec::new(linear_shape(&x.shape, weight.n), x.dtype)
}

fn dequantize_spec(weight: &W4A16WeightMetadata, dtype: &FloatDType) -> TensorSpec {
    TensorSpec::new(Shape::new([weight.k, weight.n]), (*dtype).into())
}

fn adapted_spec(weight: &W4A16WeightMetadata, _a: &TensorSpec, _b: &TensorSpec, _scale: &f64, dtype: &FloatDType) -> TensorSpec {
    dequantize_spec(weight, dtype)
}

/// What [`W4A16Backend::w4a16_dequantize_adapted`] is on every backend that computes.
fn dequantize_adapted<B: W4A16Backend>(
    weight: W4A16Weight<B>,
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    scale: f64,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let added = B::float_mul_scalar(B::float_matmul(a, b), scale.into());
    B::float_add(B::w4a16_dequantize(weight, dtype), added)
}

fn relayout_spec(weight: &W4A16WeightMetadata, layout: &WeightLayout) -> W4A16WeightMetadata {
    let W4A16WeightMetadata { words, scales, zero_points, k, n, spec, .. } = weight;
    let spec_of = |shape, tensor: &TensorSpec| TensorSpec::new(Shape::new(shape), tensor.dtype);
    W4A16WeightMetadata {
        words: spec_of(layout.words(*k, *n, spec.bits), words),
        scales: spec_of(layout.scales(*k, *n, spec.group), scales),
        zero_points: match zero_points {
            OptionalIntMetadata::Present(zeros) => OptionalIntMetadata::Present(spec_of(layout.zero_points(*k, *n, spec), zeros)),
            OptionalIntMetadata::Absent => OptionalIntMetadata::Absent,
        },
        row_permutation: OptionalIntMetadata::Absent,
        k: *k,
        n: *n,
        spec: *spec,
        layout: *layout,
    }
}

/// [.., K] to [.., N].
pub(crate) fn linear_shape(x: &Shape, n: usize) -> Shape {
    let mut shape = x.clone();
    if let Some(last) = shape.rank().checked_sub(1) {
        shape[last] = n;
    }
    shape
}

/// The kernels' name for a float dtype; `None` for dtypes that no kernel takes.
pub(crate) fn activation_dtype(dtype: DType) -> Option<ActivationDtype> {
    match dtype {
        DType::F32 => Some(ActivationDtype::F32),
        DType::F16 => Some(ActivationDtype::F16),
        DType::BF16 => Some(ActivationDtype::BF16),
        _ => None,
    }
}
