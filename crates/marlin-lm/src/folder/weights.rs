//! Weights from the files of a folder.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::mpsc::Receiver;

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_marlin::backend::activation_dtype;
use burn_marlin::experts::QuantExperts;
use burn_marlin::{ActivationDtype, QuantLinear, QuantizedWeight};
use marlin_format::PlainWeight;

use super::OpenProgress;
use super::experts::HostExperts;
use super::reader::{HostProjection, HostWeights, LayerReader};
use super::upload::{UPLOAD_BYTES, contiguous, part_of, sync, upload};
use crate::ModelError;
use crate::architectures::{ExpertsShape, LayerShape};
use crate::config::ModelConfig;
use crate::model::{DenseExperts, Experts, Projection, WeightSource, finished, loaded};
use crate::parallel::ParallelError;

/// Weights from a checkpoint's files.
pub(crate) struct FileWeights<'a> {
    pub(super) reader: LayerReader<'a>,
    /// The projections that a thread reads ahead, in the order of the model; `None` to read each
    /// projection when it is asked for.
    ahead: Option<Receiver<Result<HostProjection, ModelError>>>,
    pub(super) dtype: FloatDType,
    pub(super) device: &'a Device,
    /// The rank whose part of the model is read.
    rank: usize,
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
        reader: LayerReader<'a>,
        dtype: FloatDType,
        device: &'a Device,
        on_progress: &'a mut dyn FnMut(OpenProgress<'_>),
    ) -> Self {
        Self {
            reader,
            ahead: None,
            dtype,
            device,
            rank: 0,
            read: BTreeSet::new(),
            done: 0,
            total: reader.checkpoint.size_bytes(),
            on_progress,
        }
    }

    /// Returns the source with projections of a rank that a thread reads ahead.
    pub(super) fn with_read_ahead(
        self,
        rank: usize,
        ahead: Receiver<Result<HostProjection, ModelError>>,
    ) -> Self {
        Self {
            rank,
            ahead: Some(ahead),
            ..self
        }
    }
}

impl WeightSource for FileWeights<'_> {
    type Error = ModelError;

    fn embedding(&mut self, name: &str, shape: [usize; 2]) -> Result<Param<Tensor<2>>, ModelError> {
        self.refuse_quantized_embedding(name)?;
        Ok(loaded(self.tensor(format!("{name}.weight"), shape)?))
    }

    fn vector(
        &mut self,
        tensor: &str,
        length: usize,
        part: Range<usize>,
    ) -> Result<Param<Tensor<1>>, ModelError> {
        Ok(loaded(self.tensor_part(
            tensor.into(),
            [length],
            [&[part]],
        )?))
    }

    fn projection(&mut self, layer: &LayerShape) -> Result<Projection, ModelError> {
        let mut projections = self.projections(std::slice::from_ref(layer))?;
        Ok(projections.swap_remove(0))
    }

    fn contains(&self, name: &str) -> bool {
        self.reader.checkpoint.contains_layer(name)
    }

    fn projections(&mut self, layers: &[LayerShape]) -> Result<Vec<Projection>, ModelError> {
        let names = |layers: &[LayerShape]| {
            let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
            names.join(", ")
        };
        match self.weights(layers)? {
            HostWeights::Joined(joined) => {
                let bias = self.joined_bias(layers)?;
                Ok(vec![self.place_quantized(&names(layers), joined, bias)?])
            }
            HostWeights::Separate(weights)
                if weights.len() > 1 && weights.iter().all(Option::is_none) =>
            {
                let floats = layers
                    .iter()
                    .map(|layer| self.float(layer))
                    .collect::<Result<_, _>>()?;
                let bias = self.joined_bias(layers)?;
                Ok(vec![self.place_float(
                    &names(layers),
                    Tensor::cat(floats, 0),
                    bias,
                )?])
            }
            HostWeights::Separate(weights) => {
                let separate = layers.iter().zip(weights).map(|(layer, weight)| {
                    let bias = self.bias(layer)?;
                    match weight {
                        Some(weight) => self.place_quantized(&layer.name, weight, bias),
                        None => {
                            let weight = self.float(layer)?;
                            self.place_float(&layer.name, weight, bias)
                        }
                    }
                });
                separate.collect()
            }
        }
    }

    fn experts(&mut self, block: &str, shape: &ExpertsShape) -> Result<Experts, ModelError> {
        let (mut gate_up, mut down) = (HostExperts::default(), HostExperts::default());
        for (expert, layers) in shape.experts_of(block).enumerate() {
            let weights = self.weights(&layers.gate_up)?;
            gate_up.push(expert, &layers.gate_up, weights)?;
            let layer = std::slice::from_ref(&layers.down);
            let weights = self.weights(layer)?;
            down.push(expert, layer, weights)?;
        }
        let biases = match shape.bias {
            true => Some(self.expert_biases(block, shape)?),
            false => None,
        };
        let name = format!("{block}.{}", shape.name);
        match (gate_up, down) {
            (HostExperts::Quantized(gate_up), HostExperts::Quantized(down)) => {
                sync(self.device, &name)?;
                let (activations, device) = (self.activations(), self.device);
                let experts = QuantExperts::new(shape.router, gate_up, down, activations, device)
                    .and_then(|experts| finished(experts, biases, shape.epilogue));
                let failed = |source| ModelError::Layer {
                    layer: name,
                    source,
                };
                Ok(Experts::Quant(experts.map_err(failed)?))
            }
            (HostExperts::Float(gate_up), HostExperts::Float(down)) => {
                let [gate_up_bias, down_bias] = DenseExperts::biases(biases);
                Ok(Experts::Dense(DenseExperts {
                    gate_up: loaded(self.float_experts(&gate_up)?),
                    down: loaded(self.float_experts(&down)?),
                    gate_up_bias,
                    down_bias,
                    router: shape.router,
                    epilogue: shape.epilogue,
                }))
            }
            _ => Err(ModelError::MixedExperts { layer: name }),
        }
    }
}

impl FileWeights<'_> {
    pub(super) fn tensor<const D: usize>(
        &mut self,
        name: String,
        shape: [usize; D],
    ) -> Result<Tensor<D>, ModelError> {
        let view = self.reader.checkpoint.tensor(&name)?.expect_shape(&shape)?;
        let tensor = upload(&view, shape, self.dtype, self.device, UPLOAD_BYTES)?;
        self.finish(&name, std::slice::from_ref(&name));
        Ok(tensor)
    }

    /// Uploads the parts of a tensor with these indices of each of its dimensions.
    pub(super) fn tensor_part<const D: usize>(
        &mut self,
        name: String,
        shape: [usize; D],
        parts: [&[Range<usize>]; D],
    ) -> Result<Tensor<D>, ModelError> {
        let view = self.reader.checkpoint.tensor(&name)?.expect_shape(&shape)?;
        let bytes = part_of(view.bytes(), &shape, &parts);
        let shape: [usize; D] = parts.map(|ranges| ranges.iter().map(ExactSizeIterator::len).sum());
        let view = view.with_bytes(&shape, &bytes);
        let tensor = upload(&view, shape, self.dtype, self.device, UPLOAD_BYTES)?;
        self.finish(&name, std::slice::from_ref(&name));
        Ok(tensor)
    }

    /// Marks tensors as read, releases their pages, and reports progress.
    pub(super) fn finish(&mut self, layer: &str, tensors: &[String]) {
        for name in tensors {
            if let Ok(tensor) = self.reader.checkpoint.tensor(name) {
                self.done += tensor.bytes().len();
                self.reader.checkpoint.release(name);
            }
        }
        self.read.extend(tensors.iter().cloned());
        (self.on_progress)(OpenProgress {
            layer,
            done: self.done,
            total: self.total,
        });
    }

    /// Reads the quantised weights of a projection, or takes them from the thread that reads ahead.
    fn weights(&mut self, layers: &[LayerShape]) -> Result<HostWeights, ModelError> {
        let projection = match &self.ahead {
            // The thread sends every projection that a model asks for, and stops after an error:
            // of the files, which rank 0 receives, or of a rank.
            Some(ahead) => match ahead.recv() {
                Ok(projection) => projection?,
                Err(_) => return Err(ParallelError::Stopped { rank: self.rank }.into()),
            },
            None => self.reader.projection(layers)?,
        };
        for (name, tensors) in projection.read {
            self.finish(&name, &tensors);
        }
        Ok(projection.weights)
    }

    /// Uploads a float weight, [N, K].
    pub(super) fn float(&mut self, layer: &LayerShape) -> Result<Tensor<2>, ModelError> {
        let name = format!("{}.weight", layer.name);
        match &layer.part {
            None => self.tensor(name, [layer.dims[1], layer.dims[0]]),
            Some(part) => {
                let [k, n] = part.dims;
                let rows = std::slice::from_ref(&part.rows);
                self.tensor_part(name, [n, k], [&part.columns, rows])
            }
        }
    }

    fn bias(&mut self, layer: &LayerShape) -> Result<Option<Tensor<1>>, ModelError> {
        if !layer.bias {
            return Ok(None);
        }
        let name = format!("{}.bias", layer.name);
        let bias = match &layer.part {
            None => self.tensor(name, [layer.dims[1]]),
            Some(part) => self.tensor_part(name, [part.dims[1]], [&part.columns]),
        };
        bias.map(Some)
    }

    /// Uploads the biases of joined layers: either all layers have one, or none has.
    pub(super) fn joined_bias(
        &mut self,
        layers: &[LayerShape],
    ) -> Result<Option<Tensor<1>>, ModelError> {
        let biases = layers
            .iter()
            .map(|layer| self.bias(layer))
            .collect::<Result<Option<Vec<_>>, _>>();
        Ok(biases?.map(|biases| Tensor::cat(biases, 0)))
    }

    /// Creates a projection from a float weight [N, K] and a bias. `name` is the name of the layer
    /// in errors.
    fn place_float(
        &self,
        name: &str,
        weight: Tensor<2>,
        bias: Option<Tensor<1>>,
    ) -> Result<Projection, ModelError> {
        sync(self.device, name)?;
        // A transposed view of the weight, which matmuls support.
        Ok(Projection::Dense(Linear {
            weight: loaded(contiguous(weight).transpose()),
            bias: bias.map(loaded),
        }))
    }

    /// Creates a projection from a quantised weight and a bias. `name` is the name of the layer in
    /// errors.
    fn place_quantized(
        &self,
        name: &str,
        weight: PlainWeight,
        bias: Option<Tensor<1>>,
    ) -> Result<Projection, ModelError> {
        // Waits for the upload of the layer before, which still holds memory of the host.
        sync(self.device, name)?;
        let weight = QuantizedWeight::from_owned_plain(weight, self.activations(), self.device);
        let linear = QuantLinear::new(weight, bias).map_err(|source| ModelError::Layer {
            layer: name.into(),
            source,
        })?;
        Ok(Projection::Quant(linear))
    }

    /// Refuses a quantised embedding, since embeddings are only read as floats.
    pub(super) fn refuse_quantized_embedding(&self, name: &str) -> Result<(), ModelError> {
        let is_float = self.reader.checkpoint.contains(&format!("{name}.weight"));
        if is_float || !self.reader.checkpoint.contains_layer(name) {
            return Ok(());
        }
        Err(ModelError::QuantizedEmbedding {
            dir: self.reader.checkpoint.dir().into(),
            layer: name.into(),
        })
    }

    /// Returns the dtype of activations for which weights are laid out.
    fn activations(&self) -> ActivationDtype {
        activation_dtype(self.dtype.into()).unwrap_or(ActivationDtype::F32)
    }

    /// Checks that every tensor was read, except for redundant ones: ignoring a tensor would change
    /// the results.
    pub(super) fn refuse_surplus(&self, config: &ModelConfig) -> Result<(), ModelError> {
        // Redundant tensors: older files hold the rotary frequencies, which follow from the config.
        // Some files hold a tied head a second time. AutoGPTQ's first versions wrote biases of
        // zeros for layers without a bias. llm-compressor writes scales for a KV cache in 8 bits;
        // a KV cache in e4m3 computes a scale for each position of a head here.
        let zeros = |name: &str| {
            self.reader
                .checkpoint
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
            .reader
            .checkpoint
            .names()
            .filter(|name| !self.read.contains(*name) && !redundant(name));
        match surplus.next() {
            None => Ok(()),
            Some(first) => {
                let tensor = first.to_string();
                Err(ModelError::SurplusTensors {
                    dir: self.reader.checkpoint.dir().into(),
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
