//! Opening a Hugging Face folder.

mod check;
mod experts;
mod reader;
mod upload;
mod weights;

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType};
use marlin_format::QuantSpec;
use marlin_format::checkpoint::{Checkpoint, Dtype, Quantization, is_float};
use marlin_text::Tokenizer;

pub(crate) use self::reader::LayerReader;
pub(crate) use self::upload::contiguous;
pub(crate) use self::weights::FileWeights;
use crate::ModelError;
use crate::config::{GenerationConfig, ModelConfig};
use crate::model::{KvCache, Model};

pub use check::check_folder;

/// Options for opening a folder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OpenOptions {
    /// The dtype of activations and float weights. The default is the checkpoint's dtype if the
    /// device computes in it, otherwise f32.
    pub dtype: Option<FloatDType>,
    /// The number of positions of the KV cache. The default is
    /// [`DEFAULT_MAX_LEN`](Self::DEFAULT_MAX_LEN), or the model's own limit if that is less.
    pub max_len: Option<usize>,
    /// True to read `tokenizer.json`, which is needed for texts.
    pub with_tokenizer: bool,
    /// The format that a float output head is rounded to, whether or not it is tied to the
    /// embedding. With `None` the head stays float.
    pub head: Option<QuantSpec>,
    /// False to keep activations in their dtype where the checkpoint declares that they are rounded
    /// to e4m3 (W8A8). True takes e4m3 where the card multiplies many rows faster with it.
    pub fp8_activations: bool,
}

impl OpenOptions {
    /// The default number of positions of the KV cache. Models support up to 131072, which would
    /// take more memory than their weights.
    pub const DEFAULT_MAX_LEN: usize = 4096;
}

impl OpenOptions {
    /// Returns the number of positions of the KV cache of a model.
    ///
    /// # Errors
    /// [`ModelError::MaxLen`] if [`max_len`](Self::max_len) is 0 or above the model's limit.
    pub fn positions(&self, config: &ModelConfig) -> Result<usize, ModelError> {
        let limit = config.positions();
        let asked = self.max_len.unwrap_or(limit.min(Self::DEFAULT_MAX_LEN));
        if asked == 0 || asked > limit {
            Err(ModelError::MaxLen { asked, limit })
        } else {
            Ok(asked)
        }
    }
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            dtype: None,
            max_len: None,
            with_tokenizer: true,
            head: None,
            fp8_activations: true,
        }
    }
}

/// The progress of reading a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenProgress<'a> {
    /// The layer that was read last, by its name in the checkpoint.
    pub layer: &'a str,
    /// Bytes of the tensors that were read.
    pub done: usize,
    /// Bytes of all tensors of the folder.
    pub total: usize,
}

/// A model opened from a folder, with its tokenizer and its generation config.
#[derive(Debug)]
pub struct LanguageModel {
    /// The model; [`Arc::unwrap_or_clone`] returns it without the `Arc`.
    pub model: Arc<Model>,
    /// The tokenizer, if the folder was opened with one.
    pub tokenizer: Option<Tokenizer>,
    /// The contents of `generation_config.json`, or the defaults if it does not exist.
    pub generation: GenerationConfig,
}

impl LanguageModel {
    /// Opens a Hugging Face folder on a device.
    ///
    /// Reads `config.json`, `generation_config.json` if it exists, `tokenizer.json`, and the
    /// weights: f16, bf16 or f32, and quantised projections in each of the formats that
    /// [`LayerFormat`](marlin_format::checkpoint::LayerFormat) names, each layer in the format that
    /// the configs give it. A quantised weight stays quantised: no float copy of it is made.
    ///
    /// With the feature `hub`, `dir` can also be the name of a model on the Hugging Face hub, such
    /// as `Qwen/Qwen3-8B-AWQ`, if there is no such path. What is missing in the hub's cache is
    /// downloaded, with the options that the environment has. `marlin_lm::hub::resolve` takes other
    /// options and reports progress.
    ///
    /// # Errors
    /// A [`ModelError`] that names the file, and the tensor if a tensor is the cause: missing or
    /// broken files, an unsupported architecture or quantisation, missing, misshaped or surplus
    /// tensors, a dtype that the device does not compute in.
    pub fn open(
        dir: impl AsRef<Path>,
        device: &Device,
        options: &OpenOptions,
    ) -> Result<Self, ModelError> {
        Self::open_with(dir, device, options, |_| {})
    }

    /// [Opens](Self::open) a folder, and reports progress after every tensor or quantised layer.
    ///
    /// Layers are read one at a time from the mapped files; the layers of a joined matmul are read
    /// together, and the experts of a block are held until all of them are read. They are converted
    /// on all cores, sent to the device, and dropped, together with the pages of the files. While
    /// the device receives one projection, the next is read.
    ///
    /// # Errors
    /// See [`open`](Self::open).
    pub fn open_with(
        dir: impl AsRef<Path>,
        device: &Device,
        options: &OpenOptions,
        mut on_progress: impl FnMut(OpenProgress<'_>),
    ) -> Result<Self, ModelError> {
        let dir = &*named_folder(dir.as_ref())?;
        let config_path = dir.join("config.json");
        let mut config = ModelConfig::read(&config_path)?;
        let quantization = Quantization::read(dir)?
            .map(|quantization| quantization.with_fp8_activations(options.fp8_activations));
        let generation = GenerationConfig::read(&dir.join("generation_config.json"), &config)?;
        let tokenizer = options
            .with_tokenizer
            .then(|| Tokenizer::open(&dir.join("tokenizer.json")))
            .transpose()?;
        let tokenizer = tokenizer.map(|tokenizer| tokenizer.for_model(config.vocab_size));
        let max_len = options.positions(&config)?;
        let checkpoint = Checkpoint::open(dir)?;
        let dtype = choose_dtype(options.dtype, &checkpoint, device)?;
        check_memory(&config, &checkpoint, dtype, max_len, device)?;
        use_own_head(&mut config, &checkpoint)?;
        let reader = LayerReader {
            checkpoint: &checkpoint,
            config_path: &config_path,
            quantization: quantization.as_ref(),
        };
        let mut model = std::thread::scope(|scope| {
            let mut source = FileWeights::new(reader, dtype, device, &mut on_progress)
                .with_read_ahead(reader.read_ahead(scope, &config));
            let model = Model::assemble(&config, max_len, device, &mut source)?;
            source.refuse_surplus(&config)?;
            Ok::<_, ModelError>(model)
        })?;
        if let Some(spec) = &options.head {
            model
                .quantize_head(spec)
                .map_err(|source| ModelError::Layer {
                    layer: "lm_head".into(),
                    source,
                })?;
        }
        tracing::info!(dir = %dir.display(), architecture = %config.architecture, ?dtype, max_len, layers = config.num_hidden_layers, "opened a model");
        Ok(Self {
            model: Arc::new(model),
            tokenizer,
            generation,
        })
    }

    /// Returns the tokenizer.
    ///
    /// # Errors
    /// [`ModelError::NoTokenizer`] if the folder was opened without one.
    pub fn tokenizer(&self) -> Result<&Tokenizer, ModelError> {
        self.tokenizer.as_ref().ok_or(ModelError::NoTokenizer)
    }
}

/// Returns the folder of a model that is given by its name, and every other path as it is.
#[cfg(feature = "hub")]
fn named_folder(dir: &Path) -> Result<Cow<'_, Path>, ModelError> {
    Ok(marlin_hub::resolve(dir, &Default::default(), |_| {})?.into())
}

/// Returns the path as it is.
#[cfg(not(feature = "hub"))]
fn named_folder(dir: &Path) -> Result<Cow<'_, Path>, ModelError> {
    Ok(dir.into())
}

pub(crate) fn choose_dtype(
    asked: Option<FloatDType>,
    checkpoint: &Checkpoint,
    device: &Device,
) -> Result<FloatDType, ModelError> {
    match asked {
        Some(dtype) if device.supports_dtype(DType::from(dtype)) => Ok(dtype),
        Some(dtype) => Err(ModelError::DeviceDtype { dtype }),
        None => {
            let dtype = checkpoint
                .info("model.embed_tokens.weight")
                .map_or(FloatDType::F32, |info| float_dtype(info.dtype));
            Ok(if device.supports_dtype(DType::from(dtype)) {
                dtype
            } else {
                FloatDType::F32
            })
        }
    }
}

/// Converts the dtype of floats in a file to Burn's; f32 if Burn does not have it.
pub(crate) fn float_dtype(dtype: Dtype) -> FloatDType {
    match dtype {
        Dtype::F16 => FloatDType::F16,
        Dtype::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    }
}

/// Checks that the device has room for the weights, a cache of one sequence, and the rotary tables,
/// and once more for the largest weight of a block's experts, which is there twice while it is laid
/// out for the device. It is called before any tensor is read, since a header and a config can
/// declare any size.
fn check_memory(
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    dtype: FloatDType,
    max_len: usize,
    device: &Device,
) -> Result<(), ModelError> {
    let size = DType::from(dtype).size();
    let bytes = |name: &str| {
        let info = checkpoint.info(name)?;
        let elements: usize = info.shape.iter().product();
        Some(
            elements.saturating_mul(if is_float(info.dtype) || is_scale(name) {
                size
            } else {
                info.dtype.bitsize().div_ceil(8)
            }),
        )
    };
    let sizes = || {
        checkpoint
            .names()
            .filter_map(|name| Some((name, bytes(name)?)))
    };
    let weights = sizes()
        .map(|(_, bytes)| bytes)
        .fold(largest_experts(sizes()), usize::saturating_add);
    // The tables hold cosines and sines in f32, half a head each.
    let tables = max_len.saturating_mul(config.head_dim).saturating_mul(4);
    let cache = KvCache::size_bytes(config, 1, max_len, dtype).saturating_add(tables);
    match burn_marlin::device::free_memory(device) {
        Some(free) if weights.saturating_add(cache) > free => Err(ModelError::TooLarge {
            weights,
            positions: max_len,
            cache,
            free,
        }),
        _ => Ok(()),
    }
}

/// Returns true if a tensor holds scales, which on a device have the dtype of the activations
/// whatever the file has.
fn is_scale(name: &str) -> bool {
    [".scales", "_scale", "_scales"]
        .iter()
        .any(|end| name.ends_with(end))
}

/// Returns the size of the largest weight of all experts of a block: that of gates and ups, or that
/// of down. `tensors` are the names and sizes of the tensors of a checkpoint.
fn largest_experts<'a>(tensors: impl Iterator<Item = (&'a str, usize)>) -> usize {
    let mut sizes = HashMap::<(&str, bool), usize>::new();
    for (name, bytes) in tensors {
        let Some((block, layer)) = name.split_once(".experts.") else {
            continue;
        };
        let is_down = layer
            .split('.')
            .any(|part| part == "w2" || part.starts_with("down_proj"));
        let size = sizes.entry((block, is_down)).or_default();
        *size = size.saturating_add(bytes);
    }
    sizes.into_values().max().unwrap_or(0)
}

/// Unties the output head if the files contain a head that differs from the embedding. As in
/// transformers from 5 on, such a head is used, whatever the config says.
fn use_own_head(config: &mut ModelConfig, checkpoint: &Checkpoint) -> Result<(), ModelError> {
    if config.tie_word_embeddings && has_own_head(checkpoint)? {
        let dir = checkpoint.dir().display();
        tracing::warn!(%dir, "the config ties the output head to the embedding, but the files hold another head: that one is used");
        config.tie_word_embeddings = false;
    }
    Ok(())
}

fn has_own_head(checkpoint: &Checkpoint) -> Result<bool, ModelError> {
    const HEAD: &str = "lm_head.weight";
    const EMBEDDING: &str = "model.embed_tokens.weight";
    if !checkpoint.contains(HEAD) || !checkpoint.contains(EMBEDDING) {
        // A quantised head cannot be tied to the embedding.
        return Ok(checkpoint.names().any(|name| name.starts_with("lm_head.")));
    }
    let (head, embedding) = (checkpoint.tensor(HEAD)?, checkpoint.tensor(EMBEDDING)?);
    Ok((head.dtype(), head.shape(), head.bytes())
        != (embedding.dtype(), embedding.shape(), embedding.bytes()))
}

#[cfg(test)]
mod tests {
    use super::{is_scale, largest_experts};

    #[test]
    fn scales_of_every_format_are_known_by_name() {
        let experts = "model.layers.0.mlp.experts";
        for name in [
            "model.layers.0.mlp.up_proj.scales".to_owned(),
            "model.layers.0.mlp.up_proj.weight_scale".to_owned(),
            format!("{experts}.gate_up_proj_scales"),
        ] {
            assert!(is_scale(&name), "{name}");
        }
        for end in [
            "gate_up_proj_blocks",
            "0.up_proj.weight_packed",
            "0.up_proj.qzeros",
        ] {
            assert!(!is_scale(&format!("{experts}.{end}")), "{end}");
        }
    }

    #[test]
    fn the_largest_experts_are_those_of_one_matmul_of_one_block() {
        let separate = [
            ("model.layers.0.mlp.experts.0.gate_proj.qweight", 100),
            ("model.layers.0.mlp.experts.0.up_proj.qweight", 100),
            ("model.layers.0.mlp.experts.0.down_proj.qweight", 150),
            ("model.layers.1.mlp.experts.0.gate_proj.qweight", 90),
            ("model.layers.1.mlp.gate.weight", 1000),
        ];
        assert_eq!(largest_experts(separate.into_iter()), 200);
        let mixtral = [
            ("model.layers.0.block_sparse_moe.experts.0.w1.weight", 7),
            ("model.layers.0.block_sparse_moe.experts.0.w2.weight", 20),
            ("model.layers.0.block_sparse_moe.experts.0.w3.weight", 7),
        ];
        assert_eq!(largest_experts(mixtral.into_iter()), 20);
        let stacked = [
            ("model.layers.0.mlp.experts.gate_up_proj_blocks", 64),
            ("model.layers.0.mlp.experts.gate_up_proj_scales", 4),
            ("model.layers.0.mlp.experts.down_proj_blocks", 32),
        ];
        assert_eq!(largest_experts(stacked.into_iter()), 68);
        assert_eq!(largest_experts([("model.norm.weight", 5)].into_iter()), 0);
    }
}
