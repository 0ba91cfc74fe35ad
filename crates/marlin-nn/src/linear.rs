//! Linear layers of a decode step as functions on tensors: with a quantised or a float weight,
//! and with the norm before them.

use crate::device::takes;
use crate::functions::{add_rms_norm, apply};
use crate::ops::DecodeBackend;
use burn::backend::Dispatch;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_marlin::QuantLinear;
use burn_marlin::backend::OptionalFloat;
use marlin_kernels::Epilogue;

/// Applies a linear layer to the RMSNorm of `residual + x`. Returns the output of the layer, and
/// the sum `residual + x`. The computation is that of [`add_rms_norm`] followed by the layer. For
/// one row on NVIDIA cards from compute capability 9.0 on, the norm and the layer run in one
/// launch.
///
/// With [`Epilogue::SwiGlu`] the layer computes the gate and up projections side by side, and the
/// output is `silu(gate) * up`. On tensor cores the matmul kernel computes SwiGLU before it rounds
/// the projections.
///
/// # Panics
/// Panics if the last dimension of `x` is not K, or if `residual` has another shape than `x`.
pub fn norm_linear<const D: usize>(
    linear: &QuantLinear,
    x: Tensor<D>,
    residual: Tensor<D>,
    norm: Tensor<1>,
    epsilon: f64,
    epilogue: Epilogue,
) -> (Tensor<D>, Tensor<D>) {
    let weight = linear.weight();
    if !takes(&x) || weight.adapter().is_some() {
        let (x, sum) = add_rms_norm(x, residual, norm, epsilon);
        return (apply(epilogue, linear.forward(x)), sum);
    }
    let ([k, _], found, features) = (weight.dims(), x.dims(), norm.dims()[0]);
    assert!(
        found.last() == Some(&k) && residual.dims() == found && features == k,
        "activations {found:?}, a residual stream {:?} and a norm of {features} features, the weight has K = {k}",
        residual.dims()
    );
    let bias = linear.bias_in(x.dtype()).map(Tensor::into_dispatch).into();
    let [x, residual, norm] = [
        x.into_dispatch(),
        residual.into_dispatch(),
        norm.into_dispatch(),
    ];
    let (out, sum) = Dispatch::decode_norm_linear(
        x,
        residual,
        norm,
        epsilon,
        weight.to_op(),
        weight.descriptor(),
        bias,
        epilogue,
    );
    (Tensor::from_dispatch(out), Tensor::from_dispatch(sum))
}

/// Applies a float linear layer: returns `x` [.., K] times `weight` [K, N], plus `bias` `[N]`, in
/// the shape [.., N].
///
/// A product of few rows runs in separate kernels
/// ([`float_gemv`](marlin_kernels::matmul::float_gemv),
/// [`few_columns`](marlin_kernels::matmul::few_columns),
/// [`lm_head`](marlin_kernels::matmul::lm_head)) if the weight is the transpose of a contiguous [N,
/// K], as checkpoints store it. Burn's matmul would read such a weight at a quarter of the card's
/// bandwidth. Other products run in Burn's matmul; on CUDA in 16 bits, in one of Burn's kernels for
/// tensor cores, without autotuning, as in [`matmul`](crate::matmul).
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    if !takes(&x) || weight.dtype() != x.dtype() {
        return burn::tensor::module::linear(x, weight, bias);
    }
    let (mut shape, [k, n], dtype) = (x.shape(), weight.dims(), x.dtype());
    let rows = shape.num_elements() / k.max(1);
    shape[D - 1] = n;
    let out = Dispatch::decode_linear(
        x.reshape([rows, k]).into_dispatch(),
        weight.into_dispatch(),
        bias_in(bias, dtype),
    );
    Tensor::<2>::from_dispatch(out).reshape(shape)
}

/// Applies a float linear layer to the RMSNorm of `residual + x`. Returns the output of the layer,
/// the RMSNorm, and the sum `residual + x`. The computation is that of [`add_rms_norm`] followed by
/// [`linear`]. For one row in 16 bits on NVIDIA cards from compute capability 8.0 on, both run in
/// one launch if [`float_gemv`](marlin_kernels::matmul::float_gemv::supports) takes the sizes and
/// the weight is the transpose of a contiguous [N, K].
///
/// # Panics
/// Panics if the last dimension of `x` is not K, or if `residual` has another shape than `x`.
pub fn norm_float_linear<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    norm: Tensor<1>,
    epsilon: f64,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> (Tensor<D>, Tensor<D>, Tensor<D>) {
    let dtypes = [weight.dtype(), norm.dtype(), residual.dtype()];
    if !takes(&x) || dtypes.iter().any(|&dtype| dtype != x.dtype()) {
        let (normalised, sum) = add_rms_norm(x, residual, norm, epsilon);
        return (linear(normalised.clone(), weight, bias), normalised, sum);
    }
    let (shape, [k, n], dtype) = (x.shape(), weight.dims(), x.dtype());
    assert!(
        shape[D - 1] == k && residual.shape() == shape && norm.dims() == [k],
        "activations {shape}, a residual stream {} and a norm of {:?} features, the weight has \
         K = {k}",
        residual.shape(),
        norm.dims()
    );
    let rows = shape.num_elements() / k.max(1);
    let rows_of = |tensor: Tensor<D>| tensor.reshape([rows, k]).into_dispatch();
    let (out, normalised, sum) = Dispatch::decode_norm_float_linear(
        rows_of(x),
        rows_of(residual),
        norm.into_dispatch(),
        epsilon,
        weight.into_dispatch(),
        bias_in(bias, dtype),
    );
    let [normalised, sum] =
        [normalised, sum].map(|rows| Tensor::<2>::from_dispatch(rows).reshape(shape.clone()));
    let mut of_out = shape;
    of_out[D - 1] = n;
    (
        Tensor::<2>::from_dispatch(out).reshape(of_out),
        normalised,
        sum,
    )
}

/// Returns a bias as an operand of an operation in a dtype.
fn bias_in(bias: Option<Tensor<1>>, dtype: DType) -> OptionalFloat<Dispatch> {
    bias.map(|bias| bias.cast(FloatDType::from(dtype)).into_dispatch())
        .into()
}
