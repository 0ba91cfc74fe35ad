//! GPTQ for the linear layers of any Burn model, with the inputs that the layers get for some
//! batches.
//!
//! The model is not run directly. It is recorded once for all batches ([Burn's graph
//! capture](burn::tensor::Device::capture)), and the recorded operations then run one by one, up to
//! the layers whose inputs are known. These layers are quantised, and the operations that follow
//! use their quantised weights.

mod record;
mod replay;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use burn::backend::DispatchDevice;
use burn::module::Module;
use burn::tensor::Device;
use burn_marlin::WeightQuantizer;
use burn_marlin::convert::{ConvertError, Report};
use marlin_format::{PlainWeight, Sparsity};

use self::record::Recording;
use self::replay::Replay;
use crate::{GptqOptions, LayerError, LayerLoss, QuantError};

/// Converts a Burn model as [`WeightQuantizer`] does, with weights quantised by GPTQ instead of
/// rounded ones.
///
/// [`quantize`](Self::quantize) takes batches and a function that runs the model on one batch. The
/// function gets the model and a recording device; it moves its inputs to that device, and runs the
/// model as usual. The function must not read values of tensors, since a recording has none. A
/// model whose operations depend on values that it computes cannot be recorded.
///
/// Layers are quantised in the order in which they run. Each layer is calibrated with its inputs
/// from the quantised layers before it, and with its inputs in the float model
/// ([`GptqOptions::correction`]). A layer that runs several times on a batch, as in a recurrent
/// network, is calibrated with all of its inputs; the inputs after the first may be computed with
/// its float weight. A layer that the function does not run, or whose weight is not used by Burn's
/// `linear`, is rounded: see [`LayerLoss::fell_back`].
///
/// Host memory holds the float weights of the model, and device memory holds the hidden states of
/// all batches.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_marlin::{GroupSize, QuantSpec, WeightQuantizer};
/// use marlin_quant::GptqCalibrator;
///
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let model = LinearConfig::new(64, 32).init(&device); // any Burn module
/// let batches = (0..4).map(|_| Tensor::<2>::random([64, 64], Distribution::Default, &device));
/// let calibrator = GptqCalibrator::new(WeightQuantizer::new(QuantSpec::int4(GroupSize::G32)));
/// let (model, report) = calibrator.quantize(model, batches, |model, batch, device| drop(model.forward(batch.to_device(device))))?;
/// assert_eq!((report.conversion.quantized(), report.layers[0].tokens), (1, 256));
/// # }
/// # Ok::<(), marlin_quant::CalibrationError>(())
/// ```
#[derive(Debug, Clone)]
pub struct GptqCalibrator {
    conversion: WeightQuantizer,
    options: GptqOptions,
}

/// The outcome of a calibration.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationReport {
    /// The outcome of the conversion for every layer.
    pub conversion: Report,
    /// The loss of GPTQ for each layer, in the order in which the layers were quantised.
    pub layers: Vec<LayerLoss>,
}

impl GptqCalibrator {
    /// Creates a calibrator for the layers and formats that a conversion selects, with default
    /// options.
    pub fn new(conversion: WeightQuantizer) -> Self {
        Self {
            conversion,
            options: GptqOptions::default(),
        }
    }

    /// Sets the options of GPTQ. Their sparsity is ignored: the conversion determines whether
    /// weights become 2:4.
    pub fn with_options(self, options: GptqOptions) -> Self {
        Self { options, ..self }
    }

    /// Quantises a model. `run` runs the model on one batch, on a recording device.
    ///
    /// # Errors
    /// A [`CalibrationError`], with the unchanged model.
    pub fn quantize<M: Module, T>(
        &self,
        model: M,
        batches: impl IntoIterator<Item = T>,
        run: impl FnMut(&M, T, &Device),
    ) -> Result<(M, CalibrationReport), ConvertError<M, CalibrationError>> {
        let (mut weights, layers) = match self.find(&model, batches, run) {
            Ok(found) => found,
            Err(error) => return Err(ConvertError { model, error }),
        };
        match self
            .conversion
            .quantize_with(model, |path| weights.remove(path))
        {
            Ok((model, conversion)) => Ok((model, CalibrationReport { conversion, layers })),
            Err(ConvertError { model, error }) => Err(ConvertError {
                model,
                error: error.into(),
            }),
        }
    }

    /// Returns the quantised weights of all layers by path, and the loss of each layer.
    fn find<M: Module, T>(
        &self,
        model: &M,
        batches: impl IntoIterator<Item = T>,
        run: impl FnMut(&M, T, &Device),
    ) -> Result<(HashMap<String, PlainWeight>, Vec<LayerLoss>), CalibrationError> {
        let layers = self.conversion.select(model)?;
        let devices = model.devices();
        let [device] = devices.as_slice() else {
            return Err(CalibrationError::Devices {
                found: devices.len(),
            });
        };
        // A conversion has one sparsity for all layers.
        let sparsity = layers
            .first()
            .map_or(Sparsity::Dense, |layer| layer.format.sparsity);
        let options = GptqOptions {
            sparsity,
            ..self.options
        };
        let recording = Recording::of(model, layers, batches, run)?;
        let device = device.clone().without_autodiff();
        match device.as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(backend) => {
                Replay::<burn::backend::Flex>::new(recording, &options, &device, *backend)
                    .quantize(&options)
            }
            #[cfg(feature = "cubecl-runtime")]
            DispatchDevice::Cube(backend) => {
                Replay::<burn::backend::Cube>::new(recording, &options, &device, backend.clone())
                    .quantize(&options)
            }
            _ => Err(CalibrationError::Device),
        }
    }
}

impl<M> From<ConvertError<M, CalibrationError>> for CalibrationError {
    fn from(refused: ConvertError<M, CalibrationError>) -> Self {
        refused.error
    }
}

impl From<LayerError> for CalibrationError {
    fn from(LayerError { layer, source }: LayerError) -> Self {
        Self::Layer { layer, source }
    }
}

/// The reason why a model could not be calibrated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// The model cannot be converted.
    #[error(transparent)]
    Convert(#[from] burn_marlin::Error),
    /// A layer cannot be quantised.
    #[error("{layer}: {source}")]
    Layer {
        /// The path of the layer's weight in the model.
        layer: String,
        /// The cause.
        source: QuantError,
    },
    /// The run of a batch cannot be recorded.
    #[error(
        "the model cannot be recorded: {reason}. A model that is calibrated must not read values of tensors while it runs; call `valid()` on one that is on \
         an autodiff device, and quantise before LoRA is applied"
    )]
    Record {
        /// The error of Burn.
        reason: String,
    },
    /// The model is on several devices.
    #[error("the model's parameters are on {found} devices; move it to one")]
    Devices {
        /// The number of devices.
        found: usize,
    },
    /// The model is on a device that calibration does not support.
    #[error(
        "calibration runs on Flex and on CubeCL's devices, if the features of marlin-quant have them; move the model to one of these"
    )]
    Device,
}
