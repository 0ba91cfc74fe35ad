use burn::module::{Module, Param};
use burn::tensor::Tensor;
use marlin_nn as decode;

/// Root mean square norm over the last dimension: [`decode::rms_norm`]. Burn's own `RmsNorm`
/// divides in the activations' dtype.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// `[hidden]`.
    pub weight: Param<Tensor<1>>,
    /// Added to the mean square.
    pub epsilon: f64,
}

impl RmsNorm {
    /// [.., hidden] to the same shape and dtype.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        decode::rms_norm(x, self.weight.val(), self.epsilon)
    }

    /// The norm of `residual + x`, and that sum.
    pub fn forward_add<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
    ) -> (Tensor<D>, Tensor<D>) {
        decode::add_rms_norm(x, residual, self.weight.val(), self.epsilon)
    }
}
