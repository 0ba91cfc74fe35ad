//! The product of activations with a quantised weight, and the dequantisation of the weight.

use super::QuantizedWeight;
use crate::backend::{QuantBackend, activation_dtype};
use burn::backend::Dispatch;
use burn::module::LoraAdapter;
use burn::tensor::module::linear;
use burn::tensor::{FloatDType, Tensor};

impl QuantizedWeight {
    /// Returns the float weight [K, N] in natural row order, without its adapter.
    pub fn dequantize(&self, dtype: FloatDType) -> Tensor<2> {
        self.effective(dtype, None)
    }

    /// Returns the float weight [K, N] plus the product of an adapter's factors.
    pub(super) fn effective<const D: usize>(
        &self,
        dtype: FloatDType,
        adapter: Option<&LoraAdapter>,
    ) -> Tensor<D> {
        // If no kernel writes the dtype, the weight is computed in f32 and cast.
        let made = if activation_dtype(dtype.into()).is_some() {
            dtype
        } else {
            FloatDType::F32
        };
        let weight = Tensor::from_dispatch(match adapter {
            None => Dispatch::quant_dequantize(self.to_op(), self.descriptor, made),
            Some(LoraAdapter { a, b, scale }) => {
                let [a, b] = [a, b].map(|factor| factor.val().cast(made).into_dispatch());
                Dispatch::quant_dequantize_adapted(
                    self.to_op(),
                    self.descriptor,
                    a,
                    b,
                    *scale,
                    made,
                )
            }
        });
        if made == dtype {
            weight
        } else {
            weight.cast(dtype)
        }
    }

    /// Multiplies activations [.., K] with this weight. The result [.., N] has the activations'
    /// dtype; sums are accumulated in f32.
    ///
    /// The kernels take activations in f32, f16 and bf16. Activations in another float dtype, or in
    /// a dtype that the device does not support, are cast to f32.
    ///
    /// # Panics
    /// Panics if the last dimension of `x` is not K, as Burn's own layers do.
    pub fn matmul<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.matmul_bias(x, None)
    }

    /// Multiplies like [`matmul`](Self::matmul), and adds a bias `[N]` in the activations' dtype
    /// before the output is rounded.
    pub(crate) fn matmul_bias<const D: usize>(
        &self,
        x: Tensor<D>,
        bias: Option<Tensor<1>>,
    ) -> Tensor<D> {
        let found = x.dims().last().copied().unwrap_or(0);
        let [k, _] = self.dims();
        assert!(
            found == k,
            "activations have {found} features in their last dimension, the weight has K = {k}"
        );
        let dtype = x.dtype();
        if activation_dtype(dtype).is_none() || !x.device().supports_dtype(dtype) {
            let bias = bias.map(|bias| bias.cast(FloatDType::F32));
            return self
                .matmul_bias(x.cast(FloatDType::F32), bias)
                .cast(FloatDType::from(dtype));
        }
        let Some(LoraAdapter { a, b, scale }) = &self.adapter else {
            return self.multiply(x, bias);
        };
        // The adapter is multiplied at its low rank, without a product of shape [K, N].
        let [a, b] = [a, b].map(|factor| factor.val().cast(FloatDType::from(dtype)));
        let adapted = linear(linear(x.clone(), a, None), b, None) * *scale;
        adapted + self.multiply(x, bias)
    }

    fn multiply<const D: usize>(&self, x: Tensor<D>, bias: Option<Tensor<1>>) -> Tensor<D> {
        let bias = bias.map(Tensor::into_dispatch).into();
        Tensor::from_dispatch(Dispatch::quant_linear(
            x.into_dispatch(),
            self.to_op(),
            self.descriptor,
            bias,
        ))
    }
}
