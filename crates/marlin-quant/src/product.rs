//! Matrix products with sums in f32. Products of f32 factors are as exact as the sums.

use std::ops::Range;

use burn::tensor::Tensor;
#[cfg(feature = "cubecl-runtime")]
use burn::{
    backend::Dispatch,
    tensor::{DType, FloatDType, s},
};

#[cfg(feature = "cubecl-runtime")]
use crate::device::{ProductBackend, has_tensor_cores};

/// The number of elements of a panel: the largest part of a matrix that is processed at a time if
/// the whole matrix is not needed. In f32 it is 64 MiB.
pub(crate) const PANEL: usize = 1 << 24;

/// Returns the number of rows or columns of `width` elements in a panel: about [`PANEL`] elements
/// together, rounded to whole tiles of a matmul.
pub(crate) fn panel(width: usize) -> usize {
    (PANEL / width.max(1)).next_multiple_of(128).max(128)
}

/// Splits `lines`, rows or columns of `width` elements, into parts that are processed one at a
/// time. Each part is a [`panel`]; the last one may be smaller.
pub(crate) fn panels(lines: Range<usize>, width: usize) -> impl Iterator<Item = Range<usize>> {
    let (end, most) = (lines.end, panel(width));
    lines
        .step_by(most)
        .map(move |start| start..end.min(start + most))
}

/// Multiplies `a` [M, K] with `b` [K, N], both in f32.
///
/// Tensor cores do not support f32, and Burn's matmul rounds factors to TF32 for them. On a device
/// with tensor cores, each factor is therefore split exactly into a sum of three bf16 parts. Of the
/// products of these parts, the six that are significant in f32 are summed.
pub(crate) fn product(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cubecl-runtime")]
    if has_tensor_cores(&a.device()) {
        return product_of_parts(a, b);
    }
    a.matmul(b)
}

/// Multiplies factors in f32, each as a sum of three bf16 parts. The six products of the parts take
/// six times the memory of the result, and the parts take one and a half times the memory of the
/// factors, so a large product is computed in panels. If the result is narrow, the panels split K,
/// since a panel of its rows would have fewer matmul tiles than a card has multiprocessors.
/// Otherwise they split the result's rows or columns, whichever are more.
#[cfg(feature = "cubecl-runtime")]
fn product_of_parts(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    let parts = |x: Tensor<2>| {
        let high = x.clone().cast(FloatDType::BF16);
        let rest = x - high.clone().cast(FloatDType::F32);
        let middle = rest.clone().cast(FloatDType::BF16);
        let low = (rest - middle.clone().cast(FloatDType::F32)).cast(FloatDType::BF16);
        [high, middle, low]
    };
    let of = |a: &Tensor<2>, b: &Tensor<2>| product_of_halves(a.clone(), b.clone());
    let sum = |[a, a1, a2]: &[Tensor<2>; 3], [b, b1, b2]: &[Tensor<2>; 3]| {
        of(a2, b) + of(a1, b1) + of(a, b2) + (of(a1, b) + of(a, b1)) + of(a, b)
    };
    let ([m, k], [_, n]) = (a.dims(), b.dims());
    let (lines, width) = (m.max(n), k.max(m.min(n)));
    if lines <= panel(width) {
        return sum(&parts(a), &parts(b));
    }
    if m.min(n) <= panel(lines) {
        let zeros = Tensor::zeros([m, n], (&a.device(), DType::F32));
        return panels(0..k, lines).fold(zeros, |found, inner| {
            let (a, b) = (
                a.clone().slice(s![.., inner.clone()]),
                b.clone().slice(s![inner, ..]),
            );
            found + sum(&parts(a), &parts(b))
        });
    }
    let mut found = Tensor::empty([m, n], (&a.device(), DType::F32));
    if m < n {
        let a = parts(a);
        for columns in panels(0..lines, width) {
            let product = sum(&a, &parts(b.clone().slice(s![.., columns.clone()])));
            found = found.slice_assign(s![.., columns], product);
        }
    } else {
        let b = parts(b);
        for rows in panels(0..lines, width) {
            let product = sum(&parts(a.clone().slice(s![rows.clone(), ..])), &b);
            found = found.slice_assign(s![rows, ..], product);
        }
    }
    found
}

/// Returns `xᵀ y` [K, N] in f32, for activations [tokens, K] and [tokens, N] in one dtype. Products
/// of 16-bit values are exact.
pub(crate) fn outer(x: Tensor<2>, y: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cubecl-runtime")]
    if x.dtype() != DType::F32 && has_tensor_cores(&x.device()) {
        return product_of_halves(x.transpose(), y);
    }
    use burn::tensor::FloatDType::F32;
    product(x.cast(F32).transpose(), y.cast(F32))
}

/// Multiplies factors in 16 bits; the result is in f32.
#[cfg(feature = "cubecl-runtime")]
fn product_of_halves(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::quant_product(
        a.into_dispatch(),
        b.into_dispatch(),
    ))
}
