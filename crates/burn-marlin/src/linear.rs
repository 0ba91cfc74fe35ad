use crate::{Error, QuantizedWeight};
use burn::module::{Module, Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor};
use marlin_format::QuantSpec;
use marlin_kernels::{ActivationDtype, Prologue};

/// A linear layer with a quantised weight, of 4 bits (W4A16) or 8 bits (W8A16): y = x W + b.
///
/// This layer is for models that are written with it. A model that is written with Burn's `Linear`
/// gets the same kernels through [`W4A16`](crate::W4A16).
#[derive(Module, Debug)]
pub struct QuantLinear {
    weight: QuantizedWeight,
    bias: Option<Param<Tensor<1>>>,
}

impl QuantLinear {
    /// Creates a layer from a weight [K, N] and a bias `[N]`.
    ///
    /// # Errors
    /// The bias has another length than the weight has output features.
    pub fn new(weight: QuantizedWeight, bias: Option<Tensor<1>>) -> Result<Self, Error> {
        let [_, expected] = weight.dims();
        if let Some(found) = bias.as_ref().map(|bias| bias.dims()[0])
            && found != expected
        {
            return Err(Error::BiasLength { expected, found });
        }
        let plan = weight.plan(
            1,
            ActivationDtype::from(weight.spec().scale_dtype),
            Prologue::None,
        );
        tracing::debug!(k = weight.dims()[0], n = expected, spec = %weight.spec(), kernel = %plan.kernel, reason = %plan.reason, "quantised layer");
        Ok(Self {
            weight,
            bias: bias.map(|bias| Param::initialized(ParamId::new(), bias)),
        })
    }

    /// Rounds the weight of a float layer to the spec's bits; the bias stays as it is. A layer that
    /// [`W4A16`](crate::W4A16) has already converted to that spec keeps its quantised weight.
    ///
    /// # Errors
    /// The errors of [`QuantizedWeight::quantize`]; the layer is already converted to another spec.
    pub fn from_linear(linear: &Linear, spec: &QuantSpec) -> Result<Self, Error> {
        let weight = match linear.weight.reparameterization::<QuantizedWeight>() {
            Some(weight) if weight.spec() == *spec => weight.detached(),
            Some(weight) => {
                return Err(Error::Converted {
                    found: weight.spec(),
                    asked: *spec,
                });
            }
            None => QuantizedWeight::quantize(linear.weight.val(), spec)?,
        };
        Self::new(weight, linear.bias.as_ref().map(|bias| bias.val()))
    }

    /// Creates a layer without values, with K input and N output features, for activations in a
    /// dtype. A record can be loaded into it; its outputs are NaN until then.
    ///
    /// # Errors
    /// The number of features is zero or too large.
    pub fn unloaded(
        dims: [usize; 2],
        bias: bool,
        spec: QuantSpec,
        activations: ActivationDtype,
        device: &Device,
    ) -> Result<Self, Error> {
        let [k, n] = dims;
        let weight = QuantizedWeight::unloaded(k, n, spec, activations, device)?;
        let dtype = weight.activations();
        let init = move |device: &Device, _: bool| {
            Tensor::full([n], f32::NAN, (device, DType::from(dtype)))
        };
        let bias = bias.then(|| {
            Param::uninitialized(ParamId::new(), init, device.clone(), true, Shape::new([n]))
        });
        Ok(Self { weight, bias })
    }

    /// Maps `x` [.., K] to [.., N], in the activations' dtype.
    ///
    /// # Panics
    /// Panics if the last dimension of `x` is not K, as Burn's own layers do.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let bias = self.bias_in(x.dtype());
        self.weight.matmul_bias(x, bias)
    }

    /// Returns true if the layer has a bias.
    pub fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// The bias `[N]` in the activations' dtype.
    pub fn bias_in(&self, dtype: DType) -> Option<Tensor<1>> {
        self.bias
            .as_ref()
            .map(|bias| bias.val().cast(FloatDType::from(dtype)))
    }

    /// The quantised weight.
    pub fn weight(&self) -> &QuantizedWeight {
        &self.weight
    }
}
