use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{FloatDType, Tensor};
use burn_marlin::{QuantLinear, QuantizedWeight};
use marlin_kernels::Epilogue;

use super::{RmsNorm, loaded};

/// A linear layer of the model, with a float or a quantised weight.
#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a few hundred bytes a layer, beside megabytes of weights"
)]
pub enum Projection {
    /// Burn's own linear layer, with a weight [K, N].
    Dense(Linear),
    /// A linear layer with a quantised weight.
    Quant(QuantLinear),
}

impl Projection {
    /// Applies the layer to inputs [.., K], and returns outputs [.., N].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self {
            // Burn's own matmul with such a weight is fused into a matmul that reads the packed
            // weight.
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

    /// Applies [`forward`](Self::forward) and then the epilogue to the norm of `residual + x`.
    /// Returns the output of the epilogue, and the sum `residual + x`.
    pub fn forward_add_norm<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
        norm: &RmsNorm,
        epilogue: Epilogue,
    ) -> (Tensor<D>, Tensor<D>) {
        match self {
            Self::Dense(_) => {
                let (out, _, sum) = self.forward_with_norm(x, residual, norm);
                (marlin_nn::apply(epilogue, out), sum)
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

    /// Applies [`forward`](Self::forward) to the norm of `residual + x`. Returns the output, the
    /// norm, and the sum `residual + x`.
    pub fn forward_with_norm<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
        norm: &RmsNorm,
    ) -> (Tensor<D>, Tensor<D>, Tensor<D>) {
        match self {
            Self::Dense(Linear { weight, bias })
                if weight.reparameterization::<QuantizedWeight>().is_none() =>
            {
                marlin_nn::norm_float_linear(
                    x,
                    residual,
                    norm.weight.val(),
                    norm.epsilon,
                    weight.val(),
                    bias.as_ref().map(|bias| bias.val()),
                )
            }
            _ => {
                let (x, sum) = norm.forward_add(x, residual);
                (self.forward(x.clone()), x, sum)
            }
        }
    }

    /// Returns [K, N], the numbers of input and output features.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Dense(linear) => linear.weight.shape().dims(),
            Self::Quant(linear) => linear.weight().dims(),
        }
    }

    /// Converts a quantised weight to a float weight in `dtype`.
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
