//! Weights from the files of a folder.

use std::collections::BTreeSet;
use std::path::Path;

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_marlin::backend::activation_dtype;
use burn_marlin::{ActivationDtype, QuantLinear, QuantizedWeight};
use marlin_format::checkpoint::{
    Checkpoint, CheckpointError, LayerFormat, Quantization, layer_format, layer_tensors, read_layer,
};
use marlin_format::{JoinError, PlainWeight};

use super::OpenProgress;
use super::upload::{UPLOAD_BYTES, sync, upload};
use crate::ModelError;
use crate::architectures::LayerShape;
use crate::config::ModelConfig;
use crate::model::{Projection, WeightSource, loaded};

/// Weights from a checkpoint's files.
pub(crate) struct FileWeights<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    config_path: &'a Path,
    quantization: Option<Quantization>,
    dtype: FloatDType,
    device: &'a Device,
    /// The names of the tensors that were read.
    pub(super) read: BTreeSet<String>,
    /// The number of bytes of the tensors that were read, and of all tensors (`total`).
    done: usize,
    total: usize,
    on_progress: &'a mut dyn FnMut(OpenProgress<'_>),
}

impl<'a> FileWeights<'a> {
    /// Creates a source of a checkpoint's weights, for a model with activations in `dtype`.
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        config_path: &'a Path,
        quantization: Option<Quantization>,
        dtype: FloatDType,
        device: &'a Device,
        on_progress: &'a mut dyn FnMut(OpenProgress<'_>),
    ) -> Self {
        let total = checkpoint.size_bytes();
        Self {
            checkpoint,
            config_path,
            quantization,
            dtype,
            device,
            read: BTreeSet::new(),
            done: 0,
            total,
            on_progress,
        }
    }
}

impl WeightSource for FileWeights<'_> {
    type Error = ModelError;

    fn embedding(&mut self, name: &str, shape: [usize; 2]) -> Result<Param<Tensor<2>>, ModelError> {
        self.refuse_quantized_embedding(name)?;
        Ok(loaded(self.tensor(format!("{name}.weight"), shape)?))
    }

    fn norm(&mut self, name: &str, features: usize) -> Result<Param<Tensor<1>>, ModelError> {
        Ok(loaded(self.tensor(format!("{name}.weight"), [features])?))
    }

    fn projection(&mut self, layer: &LayerShape) -> Result<Projection, ModelError> {
        let (weight, bias) = (self.weight(layer)?, self.bias(layer)?);
        self.place(&layer.name, weight, bias)
    }

    fn contains(&self, name: &str) -> bool {
        self.checkpoint.contains_layer(name)
    }

    fn projections(&mut self, layers: &[LayerShape]) -> Result<Vec<Projection>, ModelError> {
        if let [layer] = layers {
            return Ok(vec![self.projection(layer)?]);
        }
        let weights = layers
            .iter()
            .map(|layer| self.weight(layer))
            .collect::<Result<Vec<_>, _>>()?;
        let biases = layers
            .iter()
            .map(|layer| self.bias(layer))
            .collect::<Result<Vec<_>, _>>()?;
        match self.join(&weights) {
            Ok(joined) => {
                for weight in weights {
                    self.recycle(weight);
                }
                // Either all layers have a bias, or none has.
                let biases: Option<Vec<Tensor<1>>> = biases.into_iter().collect();
                let names = layers
                    .iter()
                    .map(|layer| layer.name.as_str())
                    .collect::<Vec<_>>()
                    .join(", ");
                Ok(vec![self.place(
                    &names,
                    joined,
                    biases.map(|biases| Tensor::cat(biases, 0)),
                )?])
            }
            Err(reason) => {
                let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
                tracing::debug!(layers = ?names, %reason, "a matmul for each layer");
                let layers = layers.iter().zip(weights).zip(biases);
                layers
                    .map(|((layer, weight), bias)| self.place(&layer.name, weight, bias))
                    .collect()
            }
        }
    }
}

/// The weight of a layer that was read from the files.
enum LayerWeight {
    /// A float weight [N, K], on the device.
    Float(Tensor<2>),
    /// A quantised weight, on the host.
    Plain(PlainWeight),
}

/// The reason why layers stay separate.
#[derive(Debug, thiserror::Error)]
enum NotJoined {
    #[error("some are float, some quantised")]
    Mixed,
    #[error(transparent)]
    Join(#[from] JoinError),
}

impl FileWeights<'_> {
    fn tensor<const D: usize>(
        &mut self,
        name: String,
        shape: [usize; D],
    ) -> Result<Tensor<D>, ModelError> {
        let view = self.checkpoint.tensor(&name)?.expect_shape(&shape)?;
        let tensor = upload(&view, shape, self.dtype, self.device, UPLOAD_BYTES)?;
        self.finish(&name, std::slice::from_ref(&name));
        Ok(tensor)
    }

    /// Marks tensors as read, releases their pages, and reports progress.
    pub(super) fn finish(&mut self, layer: &str, tensors: &[String]) {
        for name in tensors {
            if let Ok(tensor) = self.checkpoint.tensor(name) {
                self.done += tensor.bytes().len();
                self.checkpoint.release(name);
            }
        }
        self.read.extend(tensors.iter().cloned());
        (self.on_progress)(OpenProgress {
            layer,
            done: self.done,
            total: self.total,
        });
    }

    /// Reads a layer's weight in the format that the config gives it.
    fn weight(&mut self, layer: &LayerShape) -> Result<LayerWeight, ModelError> {
        let ([k, n], name) = (layer.dims, &layer.name);
        match self.plain(layer)? {
            None => Ok(LayerWeight::Float(
                self.tensor(format!("{name}.weight"), [n, k])?,
            )),
            Some((_, plain)) => Ok(LayerWeight::Plain(plain)),
        }
    }

    /// Reads a quantised weight in the format that the config gives it; `None` for a float weight.
    pub(super) fn plain(
        &mut self,
        layer: &LayerShape,
    ) -> Result<Option<(LayerFormat, PlainWeight)>, ModelError> {
        let (name, [k, n]) = (layer.name.as_str(), layer.dims);
        let invalid = |source| ModelError::QuantizationConfig {
            path: self.config_path.into(),
            source,
        };
        let format = layer_format(self.quantization.as_ref(), name).map_err(invalid)?;
        if format == LayerFormat::Float {
            return Ok(None);
        }
        let plain = read_layer(self.checkpoint, name, &format)?;
        let tensors = layer_tensors(self.checkpoint, name, &format);
        if (plain.k(), plain.n()) != (k, n) {
            let first = tensors
                .first()
                .and_then(|tensor| self.checkpoint.info(tensor));
            let path = first
                .map_or_else(|| self.checkpoint.dir(), |info| info.path)
                .into();
            let (expected, found) = (vec![n, k], vec![plain.n(), plain.k()]);
            return Err(CheckpointError::Shape {
                path,
                tensor: format!("{name}.weight"),
                expected,
                found,
            }
            .into());
        }
        tracing::debug!(layer = name, %format, act_order = plain.row_permutation().is_some(), "read");
        self.finish(name, &tensors);
        Ok(Some((format, plain)))
    }

    fn bias(&mut self, layer: &LayerShape) -> Result<Option<Tensor<1>>, ModelError> {
        layer
            .bias
            .then(|| self.tensor(format!("{}.bias", layer.name), [layer.dims[1]]))
            .transpose()
    }

    /// Creates a projection from a weight and a bias. `name` is the name of the layer in errors.
    fn place(
        &self,
        name: &str,
        weight: LayerWeight,
        bias: Option<Tensor<1>>,
    ) -> Result<Projection, ModelError> {
        // Waits for the upload of the layer before, so that the host holds no more than two layers.
        sync(self.device, name)?;
        match weight {
            // A transposed view of the weight, which matmuls support.
            LayerWeight::Float(weight) => Ok(Projection::Dense(Linear {
                weight: loaded(weight.transpose()),
                bias: bias.map(loaded),
            })),
            LayerWeight::Plain(plain) => {
                let linear = QuantLinear::new(
                    QuantizedWeight::from_owned_plain(plain, self.activations(), self.device),
                    bias,
                );
                Ok(Projection::Quant(linear.map_err(|source| {
                    ModelError::Layer {
                        layer: name.into(),
                        source,
                    }
                })?))
            }
        }
    }

    /// Refuses a quantised embedding, since embeddings are only read as floats.
    pub(super) fn refuse_quantized_embedding(&self, name: &str) -> Result<(), ModelError> {
        let is_float = self.checkpoint.contains(&format!("{name}.weight"));
        if is_float || !self.checkpoint.contains_layer(name) {
            return Ok(());
        }
        Err(ModelError::QuantizedEmbedding {
            dir: self.checkpoint.dir().into(),
            layer: name.into(),
        })
    }

    /// Returns the dtype of activations for which weights are laid out.
    fn activations(&self) -> ActivationDtype {
        activation_dtype(self.dtype.into()).unwrap_or(ActivationDtype::F32)
    }

    /// Makes the memory of a quantised weight available to the layers that are read next.
    fn recycle(&self, weight: LayerWeight) {
        if let LayerWeight::Plain(plain) = weight {
            self.checkpoint.recycle(plain);
        }
    }

    /// Joins weights into one weight with all outputs side by side.
    fn join(&self, weights: &[LayerWeight]) -> Result<LayerWeight, NotJoined> {
        let (mut floats, mut plains) = (Vec::new(), Vec::new());
        for weight in weights {
            match weight {
                LayerWeight::Float(weight) => floats.push(weight.clone()),
                LayerWeight::Plain(plain) => plains.push(plain),
            }
        }
        match (floats.is_empty(), plains.is_empty()) {
            (false, true) => Ok(LayerWeight::Float(Tensor::cat(floats, 0))),
            (false, false) => Err(NotJoined::Mixed),
            (true, _) => Ok(LayerWeight::Plain(self.checkpoint.join(&plains)?)),
        }
    }

    /// Checks that every tensor was read, except for redundant ones: ignoring a tensor would change
    /// the results.
    pub(super) fn refuse_surplus(&self, config: &ModelConfig) -> Result<(), ModelError> {
        // Redundant tensors: older files hold the rotary frequencies, which follow from the config.
        // Some files hold a tied head a second time. AutoGPTQ's first versions wrote biases of
        // zeros for layers without a bias. llm-compressor writes scales for a KV cache in 8 bits;
        // the KV cache here has the dtype of activations.
        let zeros = |name: &str| {
            self.checkpoint
                .tensor(name)
                .is_ok_and(|tensor| tensor.bytes().iter().all(|&byte| byte == 0))
        };
        let redundant = |name: &str| {
            name.ends_with(".rotary_emb.inv_freq")
                || (config.tie_word_embeddings && name.starts_with("lm_head."))
                || (name.ends_with("_proj.bias") && zeros(name))
                || CACHE_SCALES.iter().any(|scale| name.ends_with(scale))
        };
        let mut surplus = self
            .checkpoint
            .names()
            .filter(|name| !self.read.contains(*name) && !redundant(name));
        match surplus.next() {
            None => Ok(()),
            Some(first) => {
                let tensor = first.to_string();
                Err(ModelError::SurplusTensors {
                    dir: self.checkpoint.dir().into(),
                    count: 1 + surplus.count(),
                    tensor,
                })
            }
        }
    }
}

/// The suffixes of the scales and zero points of a KV cache in 8 bits, as llm-compressor names
/// them.
const CACHE_SCALES: [&str; 4] = [
    ".self_attn.k_scale",
    ".self_attn.v_scale",
    ".self_attn.k_zero_point",
    ".self_attn.v_zero_point",
];
