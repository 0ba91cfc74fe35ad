use burn::module::{Module, Param};
use burn::tensor::Tensor;
use marlin_nn as decode;

/// A root mean square norm over the last dimension ([`decode::rms_norm`]). Burn's own `RmsNorm`
/// divides in the dtype of activations instead.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// The weight, `[hidden]`.
    pub weight: Param<Tensor<1>>,
    /// The constant that is added to the mean square.
    pub epsilon: f64,
}

impl RmsNorm {
    /// Returns the norm of `x` [.., hidden], in the same shape and dtype.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        decode::rms_norm(x, self.weight.val(), self.epsilon)
    }

    /// Returns the norm of `residual + x`, and the sum `residual + x`.
    pub fn forward_add<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
    ) -> (Tensor<D>, Tensor<D>) {
        decode::add_rms_norm(x, residual, self.weight.val(), self.epsilon)
    }
}
