//! Sources of weights by name: files, random numbers.

use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_marlin::{ActivationDtype, QuantLinear, QuantizedWeight};
use marlin_format::WeightFormat;

use super::Projection;
use crate::architectures::LayerShape;

/// A source of weights by name, without `.weight`: `model.layers.0.self_attn.q_proj`.
pub(crate) trait WeightSource {
    type Error;

    /// [rows, features].
    fn embedding(&mut self, name: &str, shape: [usize; 2])
    -> Result<Param<Tensor<2>>, Self::Error>;

    /// `[features]`.
    fn norm(&mut self, name: &str, features: usize) -> Result<Param<Tensor<1>>, Self::Error>;

    /// A layer.
    fn projection(&mut self, layer: &LayerShape) -> Result<Projection, Self::Error>;

    /// True if it has a layer of this name.
    fn contains(&self, name: &str) -> bool;

    /// Layers of the same K: one projection with their outputs side by side, or one for each.
    fn projections(&mut self, layers: &[LayerShape]) -> Result<Vec<Projection>, Self::Error>;
}

/// Random weights, as Hugging Face initialises these models: normal with a standard deviation of
/// 0.02, biases 0, norms 1.
pub(crate) struct RandomWeights<'a> {
    pub(crate) device: &'a Device,
    pub(crate) dtype: DType,
    /// The format of the projections of the layers; float without one.
    pub(crate) format: Option<WeightFormat>,
}

impl RandomWeights<'_> {
    fn normal(&self, shape: [usize; 2]) -> Tensor<2> {
        Tensor::random(
            shape,
            Distribution::Normal(0.0, 0.02),
            (self.device, self.dtype),
        )
    }
}

impl WeightSource for RandomWeights<'_> {
    type Error = burn_marlin::Error;

    fn embedding(&mut self, _: &str, shape: [usize; 2]) -> Result<Param<Tensor<2>>, Self::Error> {
        Ok(Param::from_tensor(self.normal(shape)))
    }

    fn norm(&mut self, _: &str, features: usize) -> Result<Param<Tensor<1>>, Self::Error> {
        Ok(Param::from_tensor(Tensor::ones(
            [features],
            (self.device, self.dtype),
        )))
    }

    fn projection(&mut self, layer: &LayerShape) -> Result<Projection, Self::Error> {
        let [k, n] = layer.dims;
        let bias = layer
            .bias
            .then(|| Tensor::zeros([n], (self.device, self.dtype)));
        match self.format.filter(|_| layer.name != "lm_head") {
            // Transposed as those of checkpoints are.
            None => Ok(Projection::Dense(Linear {
                weight: Param::from_tensor(self.normal([n, k]).transpose()),
                bias: bias.map(Param::from_tensor),
            })),
            Some(format) => {
                let activations = ActivationDtype::from(format.spec.scales.dtype);
                Ok(Projection::Quant(QuantLinear::new(
                    QuantizedWeight::random(k, n, format, activations, self.device)?,
                    bias,
                )?))
            }
        }
    }

    fn contains(&self, _: &str) -> bool {
        false
    }

    fn projections(&mut self, layers: &[LayerShape]) -> Result<Vec<Projection>, Self::Error> {
        let [first, ..] = layers else {
            return Ok(Vec::new());
        };
        let n = layers.iter().map(|layer| layer.dims[1]).sum();
        Ok(vec![self.projection(&LayerShape {
            dims: [first.dims[0], n],
            ..first.clone()
        })?])
    }
}

/// A parameter of a model that was loaded from a file.
pub(crate) fn loaded<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), tensor)
}
