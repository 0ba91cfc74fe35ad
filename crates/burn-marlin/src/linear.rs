use crate::{Error, QuantizedWeight};
use burn::config::Config;
use burn::module::{Module, Param, ParamId};
use burn::nn::Linear;
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor};
use marlin_format::QuantSpec;
use marlin_kernels::{ActivationDtype, Prologue};

/// The configuration of a [`QuantLinear`].
///
/// ```
/// use burn::tensor::Device;
/// use burn_marlin::{GroupSize, QuantLinearConfig, QuantSpec};
///
/// let layer = QuantLinearConfig::new(1024, 256, QuantSpec::int4(GroupSize::G128))
///     .with_bias(false)
///     .init(&Device::flex())?;
/// assert_eq!(layer.weight().dims(), [1024, 256]);
/// # Ok::<(), burn_marlin::Error>(())
/// ```
#[derive(Config, Debug)]
pub struct QuantLinearConfig {
    /// The number of input features, K.
    pub d_input: usize,
    /// The number of output features, N.
    pub d_output: usize,
    /// The bits of a value, the group size, the zero points and the dtype of the scales.
    pub spec: QuantSpec,
    /// True if the layer has a bias.
    #[config(default = true)]
    pub bias: bool,
    /// The dtype of the activations; by default the dtype of the scales.
    pub activations: Option<ActivationDtype>,
}

impl QuantLinearConfig {
    /// Creates a layer to load a record or a checkpoint into. Quantised weights cannot be trained
    /// from random values, so the layer has no values: its outputs are NaN until it is loaded.
    ///
    /// # Errors
    /// The number of features is zero or too large.
    pub fn init(&self, device: &Device) -> Result<QuantLinear, Error> {
        let activations = self
            .activations
            .unwrap_or_else(|| ActivationDtype::from(self.spec.scales.dtype));
        let weight =
            QuantizedWeight::unloaded(self.d_input, self.d_output, self.spec, activations, device)?;
        let (n, dtype) = (self.d_output, weight.activations());
        let init = move |device: &Device, _: bool| {
            Tensor::full([n], f32::NAN, (device, DType::from(dtype)))
        };
        let bias = self.bias.then(|| {
            Param::uninitialized(ParamId::new(), init, device.clone(), true, Shape::new([n]))
        });
        Ok(QuantLinear { weight, bias })
    }
}

/// A linear layer with a quantised weight, of 4 bits (W4A16) or 8 bits (W8A16): y = x W + b.
///
/// This layer is for models that are written with it. A model that is written with Burn's `Linear`
/// gets the same kernels through [`WeightQuantizer`](crate::WeightQuantizer).
#[derive(Module, Debug)]
pub struct QuantLinear {
    weight: QuantizedWeight,
    bias: Option<Param<Tensor<1>>>,
}

impl QuantLinear {
    /// Creates a layer from a weight [K, N] and a bias `[N]`.
    ///
    /// # Errors
    /// The length of the bias differs from the number of output features, N.
    pub fn new(weight: QuantizedWeight, bias: Option<Tensor<1>>) -> Result<Self, Error> {
        let [_, expected] = weight.dims();
        if let Some(found) = bias.as_ref().map(|bias| bias.dims()[0])
            && found != expected
        {
            return Err(Error::BiasLength { expected, found });
        }
        let plan = weight.plan(
            1,
            ActivationDtype::from(weight.spec().scales.dtype),
            Prologue::None,
        );
        tracing::debug!(k = weight.dims()[0], n = expected, spec = %weight.spec(), kernel = %plan.kernel, reason = %plan.reason, "quantised layer");
        Ok(Self {
            weight,
            bias: bias.map(|bias| Param::initialized(ParamId::new(), bias)),
        })
    }

    /// Rounds the weight of a float layer to the spec's bits; the bias stays as it is. A layer that
    /// [`WeightQuantizer`](crate::WeightQuantizer) has already converted to that spec keeps its
    /// quantised weight.
    ///
    /// # Errors
    /// The errors of [`QuantizedWeight::quantize`], and [`Error::Converted`] if the layer is
    /// already converted to another spec.
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

    /// Returns the bias `[N]` in `dtype`, or `None` if the layer has no bias.
    pub fn bias_in(&self, dtype: DType) -> Option<Tensor<1>> {
        self.bias
            .as_ref()
            .map(|bias| bias.val().cast(FloatDType::from(dtype)))
    }

    /// Returns the quantised weight.
    pub fn weight(&self) -> &QuantizedWeight {
        &self.weight
    }
}
