//! Opening a Hugging Face folder.

mod check;
mod experts;
mod memory;
mod ranks;
mod reader;
mod upload;
mod weights;

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, FloatDType};
use marlin_format::QuantSpec;
use marlin_format::checkpoint::{Checkpoint, Dtype, Quantization};
use marlin_text::Tokenizer;

use self::memory::check_memory;
use self::ranks::RankLoading;
pub(crate) use self::reader::LayerReader;
pub(crate) use self::upload::contiguous;
pub(crate) use self::weights::FileWeights;
use crate::ModelError;
use crate::config::{GenerationConfig, ModelConfig};
use crate::model::Model;
use crate::parallel::{DEFAULT_TIMEOUT, ParallelError, check_devices, connect};

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
    /// The longest time that a device of a split model waits for another. After it the model fails,
    /// and names the device that was late.
    pub rank_timeout: Duration,
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
            rank_timeout: DEFAULT_TIMEOUT,
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
        on_progress: impl FnMut(OpenProgress<'_>),
    ) -> Result<Self, ModelError> {
        Self::open_on(dir, std::slice::from_ref(device), options, on_progress)
    }

    /// [Opens](Self::open_with) a folder on several devices of one kind, over which the model is
    /// split (tensor parallelism). With one device it is the same as
    /// [`open_with`](Self::open_with).
    ///
    /// Each device has some heads, some features of the feed-forward networks and some tokens of
    /// the output head, and a thread; [`Model`] says how such a model differs. Each layer of the
    /// files is read once, and each device receives its part. A device whose memory is that of the
    /// host, such as Flex, may be given several times.
    ///
    /// # Errors
    /// See [`open`](Self::open); also [`ModelError::Parallel`] for devices that are none, of
    /// different kinds or given twice, for a model that cannot be split over so many, and for a
    /// device without room for its part, before anything is allocated; for a layer that cannot be
    /// split when it is read.
    pub fn open_on(
        dir: impl AsRef<Path>,
        devices: &[Device],
        options: &OpenOptions,
        mut on_progress: impl FnMut(OpenProgress<'_>),
    ) -> Result<Self, ModelError> {
        check_devices(devices)?;
        let device = devices.first().ok_or(ParallelError::NoDevices)?;
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
        let reader = LayerReader {
            checkpoint: &checkpoint,
            config_path: &config_path,
            quantization: quantization.as_ref(),
        };
        let shards = reader.shards(&config, devices.len())?;
        check_memory(&shards, &checkpoint, dtype, max_len, devices)?;
        use_own_head(&mut config, &checkpoint)?;
        let shards = reader.shards(&config, devices.len())?;
        let loading = RankLoading {
            reader,
            shards: &shards,
            devices,
            dtype,
            max_len,
            head: options.head.as_ref(),
        };
        let models = loading.load(&config, &mut on_progress)?;
        let model = connect(models, options.rank_timeout)?;
        tracing::info!(dir = %dir.display(), architecture = %config.architecture, ?dtype, max_len, layers = config.num_hidden_layers, devices = devices.len(), "opened a model");
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
