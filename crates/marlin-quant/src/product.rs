//! Matrix products that are summed in f32, and of factors in f32 as exact as those sums.

use burn::tensor::Tensor;
#[cfg(feature = "cubecl-runtime")]
use burn::{
    backend::Dispatch,
    tensor::{DType, FloatDType},
};

#[cfg(feature = "cubecl-runtime")]
use crate::device::{ProductBackend, has_tensor_cores};

/// `a` [M, K] times `b` [K, N], both in f32.
///
/// Tensor cores have no f32, and Burn's matmul rounds factors to TF32 for them. There each factor is the sum of three in bf16, exactly, of whose products the six
/// that reach into f32 are summed.
pub(crate) fn product(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cubecl-runtime")]
    if has_tensor_cores(&a.device()) {
        let parts = |x: Tensor<2>| {
            let high = x.clone().cast(FloatDType::BF16);
            let rest = x - high.clone().cast(FloatDType::F32);
            let middle = rest.clone().cast(FloatDType::BF16);
            let low = (rest - middle.clone().cast(FloatDType::F32)).cast(FloatDType::BF16);
            [high, middle, low]
        };
        let ([a, a1, a2], [b, b1, b2]) = (parts(a), parts(b));
        let of = |a: &Tensor<2>, b: &Tensor<2>| product_of_halves(a.clone(), b.clone());
        return of(&a2, &b) + of(&a1, &b1) + of(&a, &b2) + (of(&a1, &b) + of(&a, &b1)) + of(&a, &b);
    }
    a.matmul(b)
}

/// `xᵀ y` [K, N] in f32, of activations [tokens, K] and [tokens, N] in one dtype: products of values in 16 bits are exact.
pub(crate) fn outer(x: Tensor<2>, y: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cubecl-runtime")]
    if x.dtype() != DType::F32 && has_tensor_cores(&x.device()) {
        return product_of_halves(x.transpose(), y);
    }
    use burn::tensor::FloatDType::F32;
    product(x.cast(F32).transpose(), y.cast(F32))
}

/// A product of factors in 16 bits, in f32.
#[cfg(feature = "cubecl-runtime")]
fn product_of_halves(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::quant_product(a.into_dispatch(), b.into_dispatch()))
}
