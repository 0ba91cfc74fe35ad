//! Opening a Hugging Face folder.

use std::collections::BTreeSet;
use std::path::Path;

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_marlin::{QuantizedWeight, W4A16Linear};
use half::{bf16, f16};
use marlin_format::checkpoint::{
    Checkpoint, CheckpointError, Dtype, LayerFormat, Quantization, TensorView, layer_format, layer_tensors, read_layer,
};
use marlin_format::{JoinError, PlainWeight, QuantSpec};
use marlin_text::Tokenizer;

use crate::LlamaError;
use crate::config::{GenerationConfig, LlamaConfig};
use crate::model::{LayerShape, LlamaModel, Projection, WeightSource, loaded};

/// How a folder is opened.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OpenOptions {
    /// The dtype of activations and float weights; without one that of the checkpoint where the device computes in it, f32 otherwise.
    pub dtype: Option<FloatDType>,
    /// Positions of the cache; without one [`DEFAULT_MAX_LEN`](Self::DEFAULT_MAX_LEN), or all the model was made for where those are fewer.
    pub max_len: Option<usize>,
    /// Whether `tokenizer.json` is read. Texts need it.
    pub with_tokenizer: bool,
    /// The format that a float output head is rounded to, tied to the embedding or not; without one it stays float.
    pub head: Option<QuantSpec>,
}

impl OpenOptions {
    /// Positions of the cache where none were asked for. Models are made for up to 131072, which would take more memory than their weights.
    pub const DEFAULT_MAX_LEN: usize = 4096;
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { dtype: None, max_len: None, with_tokenizer: true, head: None }
    }
}

/// How far a folder is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenProgress<'a> {
    /// The layer that was read last, by its name in the checkpoint.
    pub layer: &'a str,
    /// Bytes of the tensors that were read.
    pub done: usize,
    /// Bytes of all tensors of the folder.
    pub total: usize,
}

/// A model from a folder: the model, its tokenizer, and how its makers generate with it.
#[derive(Debug)]
pub struct Llama {
    /// The model.
    pub model: LlamaModel,
    /// The tokenizer, where it was opened with one.
    pub tokenizer: Option<Tokenizer>,
    /// `generation_config.json`, or the defaults where there is none.
    pub generation: GenerationConfig,
}

impl Llama {
    /// Opens a Hugging Face folder on a device.
    ///
    /// Reads `config.json`, `generation_config.json` where it is there, `tokenizer.json`, and the weights: f16, bf16 or f32, and quantised
    /// projections in each of the formats that [`LayerFormat`] names, each layer in the one that the configs give it. A quantised weight stays
    /// one: no float copy of it is made.
    ///
    /// # Errors
    /// A [`LlamaError`] that names the file, and the tensor where it is one: files that are missing or broken, another architecture, another
    /// quantisation, tensors that are missing, misshaped or surplus, a tokenizer that does not match, a dtype the device does not compute in.
    pub fn open(dir: impl AsRef<Path>, device: &Device, options: &OpenOptions) -> Result<Self, LlamaError> {
        Self::open_with(dir, device, options, |_| {})
    }

    /// [`open`](Self::open), with a call after every tensor or quantised layer.
    ///
    /// Layers are read one at a time from the mapped files, or those of one joined matmul together: converted on all cores, sent to the device,
    /// and dropped, the pages of the files with them.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(
        dir: impl AsRef<Path>,
        device: &Device,
        options: &OpenOptions,
        mut on_progress: impl FnMut(OpenProgress<'_>),
    ) -> Result<Self, LlamaError> {
        let dir = dir.as_ref();
        let config_path = dir.join("config.json");
        let mut config = LlamaConfig::read(&config_path)?;
        let quantization = Quantization::read(dir)?;
        let generation = GenerationConfig::read(&dir.join("generation_config.json"), &config)?;
        let tokenizer = options.with_tokenizer.then(|| Tokenizer::open(&dir.join("tokenizer.json"))).transpose()?;
        if let Some(tokenizer) = &tokenizer {
            tokenizer.check_vocab(config.vocab_size)?;
        }
        let limit = config.max_position_embeddings;
        let max_len = options.max_len.unwrap_or(limit.min(OpenOptions::DEFAULT_MAX_LEN));
        if max_len == 0 || max_len > limit {
            return Err(LlamaError::MaxLen { asked: max_len, limit });
        }

        let checkpoint = Checkpoint::open(dir)?;
        if config.tie_word_embeddings && has_own_head(&checkpoint)? {
            tracing::warn!(dir = %dir.display(), "the config ties the output head to the embedding, but the files hold another head: that one is used");
            config.tie_word_embeddings = false;
        }
        let dtype = choose_dtype(options.dtype, &checkpoint, device)?;
        let mut source = FileWeights {
            checkpoint: &checkpoint,
            config_path: &config_path,
            quantization,
            dtype,
            device,
            read: BTreeSet::new(),
            done: 0,
            total: checkpoint.size_bytes(),
            on_progress: &mut on_progress,
        };
        let mut model = LlamaModel::assemble(&config, max_len, device, &mut source)?;
        source.refuse_surplus(&config)?;
        if let Some(spec) = &options.head {
            model.quantize_head(spec).map_err(|source| LlamaError::Layer { layer: "lm_head".into(), source })?;
        }
        tracing::info!(dir = %dir.display(), architecture = %config.architecture, ?dtype, max_len, layers = config.num_hidden_layers, "opened a model");
        Ok(Self { model, tokenizer, generation })
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`LlamaError::NoTokenizer`] where it was opened without one.
    pub fn tokenizer(&self) -> Result<&Tokenizer, LlamaError> {
        self.tokenizer.as_ref().ok_or(LlamaError::NoTokenizer)
    }
}

fn choose_dtype(asked: Option<FloatDType>, checkpoint: &Checkpoint, device: &Device) -> Result<FloatDType, LlamaError> {
    match asked {
        Some(dtype) if device.supports_dtype(DType::from(dtype)) => Ok(dtype),
        Some(dtype) => Err(LlamaError::DeviceDtype { dtype }),
        None => {
            let dtype = match checkpoint.tensor("model.embed_tokens.weight")?.dtype() {
                Dtype::F16 => FloatDType::F16,
                Dtype::BF16 => FloatDType::BF16,
                _ => FloatDType::F32,
            };
            Ok(if device.supports_dtype(DType::from(dtype)) { dtype } else { FloatDType::F32 })
        }
    }
}

/// Weights from a checkpoint's files.
struct FileWeights<'a> {
    checkpoint: &'a Checkpoint,
    config_path: &'a Path,
    quantization: Option<Quantization>,
    dtype: FloatDType,
    device: &'a Device,
    /// Names of the tensors that were read.
    read: BTreeSet<String>,
    /// Bytes of those, and of all.
    done: usize,
    total: usize,
    on_progress: &'a mut dyn FnMut(OpenProgress<'_>),
}

impl WeightSource for FileWeights<'_> {
    type Error = LlamaError;

    fn embedding(&mut self, name: &str, shape: [usize; 2]) -> Result<Param<Tensor<2>>, LlamaError> {
        Ok(loaded(self.tensor(format!("{name}.weight"), shape)?))
    }

    fn norm(&mut self, name: &str, features: usize) -> Result<Param<Tensor<1>>, LlamaError> {
        Ok(loaded(self.tensor(format!("{name}.weight"), [features])?))
    }

    fn projection(&mut self, layer: &LayerShape) -> Result<Projection, LlamaError> {
        let (weight, bias) = (self.weight(layer)?, self.bias(layer)?);
        self.place(&layer.name, weight, bias)
    }

    fn contains(&self, name: &str) -> bool {
        self.checkpoint.contains_layer(name)
    }

    fn projections(&mut self, layers: &[LayerShape]) -> Result<Vec<Projection>, LlamaError> {
        if let [layer] = layers {
            return Ok(vec![self.projection(layer)?]);
        }
        let weights = layers.iter().map(|layer| self.weight(layer)).collect::<Result<Vec<_>, _>>()?;
        let biases = layers.iter().map(|layer| self.bias(layer)).collect::<Result<Vec<_>, _>>()?;
        match self.join(&weights) {
            Ok(joined) => {
                for weight in weights {
                    self.recycle(weight);
                }
                // All of them have one, or none.
                let biases: Option<Vec<Tensor<1>>> = biases.into_iter().collect();
                let names = layers.iter().map(|layer| layer.name.as_str()).collect::<Vec<_>>().join(", ");
                Ok(vec![self.place(&names, joined, biases.map(|biases| Tensor::cat(biases, 0)))?])
            }
            Err(reason) => {
                let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
                tracing::debug!(layers = ?names, %reason, "a matmul for each layer");
                let layers = layers.iter().zip(weights).zip(biases);
                layers.map(|((layer, weight), bias)| self.place(&layer.name, weight, bias)).collect()
            }
        }
    }
}

/// A layer's weight, on its way from the files to the device.
enum LayerWeight {
    /// [N, K], on the device.
    Float(Tensor<2>),
    /// Quantised, on the host.
    Plain(PlainWeight),
}

/// Why layers stay apart.
#[derive(Debug, thiserror::Error)]
enum Apart {
    #[error("some are float, some quantised")]
    Mixed,
    #[error(transparent)]
    Join(#[from] JoinError),
}

impl FileWeights<'_> {
    fn tensor<const D: usize>(&mut self, name: String, shape: [usize; D]) -> Result<Tensor<D>, LlamaError> {
        let view = self.checkpoint.tensor(&name)?.expect_shape(&shape)?;
        let tensor = upload(&view, shape, self.dtype, self.device, UPLOAD_BYTES)?;
        self.finish(&name, std::slice::from_ref(&name));
        Ok(tensor)
    }

    /// These tensors have been read and are not needed again.
    fn finish(&mut self, layer: &str, tensors: &[String]) {
        for name in tensors {
            if let Ok(tensor) = self.checkpoint.tensor(name) {
                self.done += tensor.bytes().len();
                self.checkpoint.release(name);
            }
        }
        self.read.extend(tensors.iter().cloned());
        (self.on_progress)(OpenProgress { layer, done: self.done, total: self.total });
    }

    /// Reads a layer's weight in the format that the config gives it.
    fn weight(&mut self, layer: &LayerShape) -> Result<LayerWeight, LlamaError> {
        let (name, [k, n]) = (layer.name.as_str(), layer.dims);
        let invalid = |source| LlamaError::QuantizationConfig { path: self.config_path.into(), source };
        let format = layer_format(self.quantization.as_ref(), name).map_err(invalid)?;
        if format == LayerFormat::Float {
            return Ok(LayerWeight::Float(self.tensor(format!("{name}.weight"), [n, k])?));
        }
        let plain = read_layer(self.checkpoint, name, &format)?;
        let tensors = layer_tensors(self.checkpoint, name, &format);
        if (plain.k(), plain.n()) != (k, n) {
            let first = tensors.first().and_then(|tensor| self.checkpoint.info(tensor));
            let path = first.map_or_else(|| self.checkpoint.dir(), |info| info.path).into();
            let (expected, found) = (vec![n, k], vec![plain.n(), plain.k()]);
            return Err(CheckpointError::Shape { path, tensor: format!("{name}.weight"), expected, found }.into());
        }
        tracing::debug!(layer = name, %format, act_order = plain.row_permutation().is_some(), "read");
        self.finish(name, &tensors);
        Ok(LayerWeight::Plain(plain))
    }

    fn bias(&mut self, layer: &LayerShape) -> Result<Option<Tensor<1>>, LlamaError> {
        layer.bias.then(|| self.tensor(format!("{}.bias", layer.name), [layer.dims[1]])).transpose()
    }

    /// The projection of a weight. `name` is what errors call it.
    fn place(&self, name: &str, weight: LayerWeight, bias: Option<Tensor<1>>) -> Result<Projection, LlamaError> {
        // The layer before is on its way to the device: the host has no more than these two.
        sync(self.device, name)?;
        match weight {
            // A view: a matmul reads a transposed weight as well.
            LayerWeight::Float(weight) => Ok(Projection::Dense(Linear { weight: loaded(weight.transpose()), bias: bias.map(loaded) })),
            LayerWeight::Plain(plain) => {
                let linear = W4A16Linear::new(QuantizedWeight::from_plain(&plain, self.device), bias);
                self.recycle(LayerWeight::Plain(plain));
                Ok(Projection::W4A16(linear.map_err(|source| LlamaError::Layer { layer: name.into(), source })?))
            }
        }
    }

    /// The next layers are read into the memory of this one.
    fn recycle(&self, weight: LayerWeight) {
        if let LayerWeight::Plain(plain) = weight {
            self.checkpoint.recycle(plain);
        }
    }

    /// One weight with the outputs of all of them side by side.
    fn join(&self, weights: &[LayerWeight]) -> Result<LayerWeight, Apart> {
        let (mut floats, mut plains) = (Vec::new(), Vec::new());
        for weight in weights {
            match weight {
                LayerWeight::Float(weight) => floats.push(weight.clone()),
                LayerWeight::Plain(plain) => plains.push(plain),
            }
        }
        match (floats.is_empty(), plains.is_empty()) {
            (false, true) => Ok(LayerWeight::Float(Tensor::cat(floats, 0))),
            (false, false) => Err(Apart::Mixed),
            (true, _) => Ok(LayerWeight::Plain(self.checkpoint.join(&plains)?)),
        }
    }

    /// Every tensor must have been read: what the model leaves out would change its results.
    fn refuse_surplus(&self, config: &LlamaConfig) -> Result<(), LlamaError> {
        // Older files hold the rotary frequencies, which follow from the config; some hold a tied head a second time; AutoGPTQ's first versions
        // wrote biases of zeros for layers without one; llm-compressor writes scales for a cache in 8 bits, where this one keeps the dtype of the
        // activations.
        let zeros = |name: &str| self.checkpoint.tensor(name).is_ok_and(|tensor| tensor.bytes().iter().all(|&byte| byte == 0));
        let redundant = |name: &str| {
            name.ends_with(".rotary_emb.inv_freq")
                || (config.tie_word_embeddings && name.starts_with("lm_head."))
                || (name.ends_with("_proj.bias") && zeros(name))
                || CACHE_SCALES.iter().any(|scale| name.ends_with(scale))
        };
        let mut surplus = self.checkpoint.names().filter(|name| !self.read.contains(*name) && !redundant(name));
        match surplus.next() {
            None => Ok(()),
            Some(first) => {
                let tensor = first.to_string();
                Err(LlamaError::SurplusTensors { dir: self.checkpoint.dir().into(), count: 1 + surplus.count(), tensor })
            }
        }
    }
}

/// Of a cache in 8 bits, as llm-compressor names them.
const CACHE_SCALES: [&str; 4] = [".self_attn.k_scale", ".self_attn.v_scale", ".self_attn.k_zero_point", ".self_attn.v_zero_point"];

/// Whether the files hold an output head that is not the embedding once more. As in transformers from 5 on, such a head counts, whatever the config says.
fn has_own_head(checkpoint: &Checkpoint) -> Result<bool, LlamaError> {
    const HEAD: &str = "lm_head.weight";
    const EMBEDDING: &str = "model.embed_tokens.weight";
    if !checkpoint.contains(HEAD) || !checkpoint.contains(EMBEDDING) {
        // A quantised head is none that an embedding could be.
        return Ok(checkpoint.names().any(|name| name.starts_with("lm_head.")));
    }
    let (head, embedding) = (checkpoint.tensor(HEAD)?, checkpoint.tensor(EMBEDDING)?);
    Ok((head.dtype(), head.shape(), head.bytes()) != (embedding.dtype(), embedding.shape(), embedding.bytes()))
}

/// Bytes of a float tensor that the host has at a time, on their way to the device.
const UPLOAD_BYTES: usize = 64 << 20;

/// Waits until the device has what was given to it, the last of it for a layer or tensor.
fn sync(device: &Device, layer: &str) -> Result<(), LlamaError> {
    device.sync().map_err(|error| LlamaError::Upload { layer: layer.into(), reason: error.to_string() })
}

/// A float tensor on the device. One of more than `most` bytes goes there in blocks of its first dimension.
fn upload<const D: usize>(
    view: &TensorView<'_>,
    shape: [usize; D],
    dtype: FloatDType,
    device: &Device,
    most: usize,
) -> Result<Tensor<D>, LlamaError> {
    let target = (device, DType::from(dtype));
    let row_bytes = view.bytes().len() / shape[0].max(1);
    let in_blocks = matches!(view.dtype(), Dtype::F16 | Dtype::BF16 | Dtype::F32);
    if view.bytes().len() <= most || row_bytes == 0 || !in_blocks {
        return Ok(Tensor::from_data(data(view, view.bytes(), shape)?, target));
    }
    let rows = (most / row_bytes).max(1);
    let mut tensor = Tensor::empty(shape, target);
    for (block, bytes) in view.bytes().chunks(rows * row_bytes).enumerate() {
        let (start, count) = (block * rows, bytes.len() / row_bytes);
        let (mut block_shape, mut ranges) = (shape, shape.map(|length| 0..length));
        block_shape[0] = count;
        ranges[0] = start..start + count;
        let values = Tensor::from_data(data(view, bytes, block_shape)?, target);
        tensor = tensor.slice_assign(ranges, values);
        // Copies are queued: without a wait the host would have all blocks at once.
        sync(device, view.name())?;
    }
    Ok(tensor)
}

/// Float values in the file's dtype: `bytes` of a tensor, as many as `shape` has.
fn data<const D: usize>(view: &TensorView<'_>, bytes: &[u8], shape: [usize; D]) -> Result<TensorData, CheckpointError> {
    let halves = bytes.as_chunks::<2>().0;
    Ok(match view.dtype() {
        Dtype::F16 => TensorData::new(halves.iter().map(|&bytes| f16::from_le_bytes(bytes)).collect(), shape),
        Dtype::BF16 => TensorData::new(halves.iter().map(|&bytes| bf16::from_le_bytes(bytes)).collect(), shape),
        Dtype::F32 => TensorData::new(bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(), shape),
        _ => TensorData::new(view.to_f32()?, shape),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::support::{config, random_weights, rng, temporary, write_folder};

    #[test]
    fn blocks_make_the_whole_tensor() {
        let device = Device::flex();
        let config = config();
        let weights = random_weights(&config, &mut rng());
        let name = "model.embed_tokens.weight";
        let shape = [config.vocab_size, config.hidden_size];
        for file in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let (_parent, dir) = temporary();
            write_folder(&dir, &config, &weights, file);
            let checkpoint = Checkpoint::open(&dir).unwrap();
            let view = checkpoint.tensor(name).unwrap();
            let values = |most| upload(&view, shape, FloatDType::F32, &device, most).unwrap().try_into_vec_as::<f32>().unwrap();
            let whole = values(usize::MAX);
            // One row at a time, some, all but one, and all.
            for rows in [0, 1, 7, config.vocab_size - 1, config.vocab_size] {
                assert_eq!(values(rows * view.bytes().len() / config.vocab_size), whole, "{file:?}, {rows} rows");
            }
        }
    }
}
