use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{FloatDType, Tensor};
use burn_marlin::{QuantLinear, QuantizedWeight};
use marlin_kernels::Epilogue;

use super::{RmsNorm, loaded};

/// A linear layer of the model: float, or with a 4-bit weight.
#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a few hundred bytes a layer, beside megabytes of weights"
)]
pub enum Projection {
    /// Burn's own layer, weight [K, N].
    Dense(Linear),
    /// A quantised weight.
    Quant(QuantLinear),
}

impl Projection {
    /// [.., K] to [.., N].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self {
            // Burn's own matmul of such a weight is fused to one that reads the packed weight.
            Self::Dense(linear)
                if linear
                    .weight
                    .reparameterization::<QuantizedWeight>()
                    .is_some() =>
            {
                linear.forward(x)
            }
            Self::Dense(Linear { weight, bias }) => {
                marlin_nn::linear(x, weight.val(), bias.as_ref().map(|bias| bias.val()))
            }
            Self::Quant(linear) => linear.forward(x),
        }
    }

    /// The epilogue of [`forward`](Self::forward) of the norm of `residual + x`, and that sum.
    pub fn forward_add_norm<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
        norm: &RmsNorm,
        epilogue: Epilogue,
    ) -> (Tensor<D>, Tensor<D>) {
        match self {
            Self::Dense(_) => {
                let (x, sum) = norm.forward_add(x, residual);
                (marlin_nn::apply(epilogue, self.forward(x)), sum)
            }
            Self::Quant(linear) => marlin_nn::norm_linear(
                linear,
                x,
                residual,
                norm.weight.val(),
                norm.epsilon,
                epilogue,
            ),
        }
    }

    /// [K, N]: input and output features.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Dense(linear) => linear.weight.shape().dims(),
            Self::Quant(linear) => linear.weight().dims(),
        }
    }

    /// Makes a quantised weight a float one, in `dtype`.
    pub(crate) fn dequantize(&mut self, dtype: FloatDType) {
        if let Self::Quant(linear) = self {
            let bias = linear.bias_in(dtype.into()).map(loaded);
            *self = Self::Dense(Linear {
                weight: loaded(linear.weight().dequantize(dtype)),
                bias,
            });
        }
    }
}
