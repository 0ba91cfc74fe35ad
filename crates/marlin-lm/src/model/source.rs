//! Sources of weights by name: files or random numbers.

use std::ops::Range;

use burn::module::{Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_marlin::experts::QuantExperts;
use burn_marlin::{ActivationDtype, QuantLinear, QuantizedWeight};
use marlin_format::WeightFormat;
use marlin_kernels::Epilogue;

use super::{DenseExperts, Experts, Projection};
use crate::architectures::{ExpertsShape, LayerShape};
use crate::folder::contiguous;

/// A source of weights by name. Names have no suffix `.weight`, as in
/// `model.layers.0.self_attn.q_proj`.
pub(crate) trait WeightSource {
    type Error;

    /// Returns an embedding of `shape` [rows, features].
    fn embedding(&mut self, name: &str, shape: [usize; 2])
    -> Result<Param<Tensor<2>>, Self::Error>;

    /// Returns the values `part` of a vector `[length]` by the whole name of its tensor: the weight
    /// of a norm, or the sinks of an attention.
    fn vector(
        &mut self,
        tensor: &str,
        length: usize,
        part: Range<usize>,
    ) -> Result<Param<Tensor<1>>, Self::Error>;

    /// Returns a linear layer.
    fn projection(&mut self, layer: &LayerShape) -> Result<Projection, Self::Error>;

    /// Returns true if the source lists a layer of this name.
    fn contains(&self, name: &str) -> bool;

    /// Returns layers of the same K: one projection with the outputs of all layers side by side, or
    /// one projection for each layer.
    fn projections(&mut self, layers: &[LayerShape]) -> Result<Vec<Projection>, Self::Error>;

    /// Returns the experts of the block with the name `block`.
    fn experts(&mut self, block: &str, shape: &ExpertsShape) -> Result<Experts, Self::Error>;
}

/// Random weights, as Hugging Face initialises these models: normal with a standard deviation of
/// 0.02, biases 0, norms and sinks 1.
pub(crate) struct RandomWeights<'a> {
    pub(crate) device: &'a Device,
    pub(crate) dtype: DType,
    /// The format of the blocks' projections; `None` for float weights.
    pub(crate) format: Option<WeightFormat>,
    /// True if the experts alone have the format.
    pub(crate) experts_only: bool,
}

impl RandomWeights<'_> {
    fn normal<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        contiguous(Tensor::random(
            shape,
            Distribution::Normal(0.0, 0.02),
            (self.device, self.dtype),
        ))
    }
}

impl WeightSource for RandomWeights<'_> {
    type Error = burn_marlin::Error;

    fn embedding(&mut self, _: &str, shape: [usize; 2]) -> Result<Param<Tensor<2>>, Self::Error> {
        Ok(Param::from_tensor(self.normal(shape)))
    }

    fn vector(
        &mut self,
        _: &str,
        _: usize,
        part: Range<usize>,
    ) -> Result<Param<Tensor<1>>, Self::Error> {
        let ones = Tensor::ones([part.len()], (self.device, self.dtype));
        Ok(Param::from_tensor(ones))
    }

    fn projection(&mut self, layer: &LayerShape) -> Result<Projection, Self::Error> {
        let [k, n] = layer.dims;
        let bias = layer
            .bias
            .then(|| Tensor::zeros([n], (self.device, self.dtype)));
        let is_quantized = !layer.is_float && !self.experts_only && layer.name != "lm_head";
        match self.format.filter(|_| is_quantized) {
            // Transposed, like the weights of checkpoints.
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

    fn experts(&mut self, _: &str, shape: &ExpertsShape) -> Result<Experts, Self::Error> {
        let ExpertsShape {
            router,
            hidden,
            intermediate,
            bias,
            epilogue,
            ..
        } = *shape;
        let experts = router.experts;
        let biases = bias.then(|| {
            [2 * intermediate, hidden]
                .map(|n| contiguous(Tensor::zeros([experts, n], (self.device, self.dtype))))
        });
        let Some(format) = self.format else {
            let gate_up = self.normal([experts, hidden, 2 * intermediate]);
            let [gate_up_bias, down_bias] = DenseExperts::biases(biases);
            return Ok(Experts::Dense(DenseExperts {
                gate_up: Param::from_tensor(gate_up),
                down: Param::from_tensor(self.normal([experts, intermediate, hidden])),
                gate_up_bias,
                down_bias,
                router,
                epilogue,
            }));
        };
        let activations = ActivationDtype::from(format.spec.scales.dtype);
        let experts = QuantExperts::random(
            router,
            hidden,
            intermediate,
            format,
            activations,
            self.device,
        )?;
        Ok(Experts::Quant(finished(experts, biases, epilogue)?))
    }
}

/// Returns quantised experts with their biases and their epilogue.
pub(crate) fn finished(
    experts: QuantExperts,
    biases: Option<[Tensor<2>; 2]>,
    epilogue: Epilogue,
) -> Result<QuantExperts, burn_marlin::Error> {
    let experts = match epilogue {
        Epilogue::ClampedSwiGlu => experts.with_clamped_swiglu(),
        Epilogue::None | Epilogue::SwiGlu => experts,
    };
    match biases {
        Some([gate_up, down]) => experts.with_biases(gate_up, down),
        None => Ok(experts),
    }
}

/// Creates a parameter of a model with the values of `tensor`.
pub(crate) fn loaded<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), tensor)
}
