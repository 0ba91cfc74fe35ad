//! A check of a folder that reports every fault.

use std::ops::Range;
use std::path::Path;

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use marlin_format::checkpoint::{Checkpoint, LayerFormat, Quantization, is_float};
use marlin_format::{PlainWeight, WeightDescriptor};
use marlin_text::{ChatTemplate, Message, TextError, Tokenizer};

use super::memory::check_memory;
use super::reader::{HostLayer, LayerReader};
use super::weights::FileWeights;
use super::{OpenOptions, choose_dtype, use_own_head};
use crate::ModelError;
use crate::architectures::{ExpertsShape, LayerShape};
use crate::config::{GenerationConfig, ModelConfig};
use crate::model::{DenseExperts, Experts, Model, Projection, WeightSource, loaded};
use crate::parallel::Shard;

/// The number of faults after which the check ends: the config of another model causes one for
/// every tensor.
const MOST_FAULTS: usize = 1000;

/// Opens everything in a folder that [`LanguageModel::open`](super::LanguageModel::open) opens, and
/// its chat template, without a model on the device. Returns every fault that is found, and none
/// for a folder that can be opened, chatted with, and has room on the device.
///
/// The check reads everything that [`LanguageModel::open`](super::LanguageModel::open) reads, and
/// the chat template. A folder without faults can be opened, fits the device, and has a usable chat
/// template if it has one.
///
/// `on_layer` is called with the name of every quantised layer that can be read. If the device has
/// no room for the model and the files are nearly all holes ([`Checkpoint::is_sparse_file`]),
/// values are not read: such files can declare tensors of any size.
pub fn check_folder(
    dir: &Path,
    device: &Device,
    options: &OpenOptions,
    mut on_layer: impl FnMut(&str, &LayerFormat, &PlainWeight),
) -> Vec<ModelError> {
    let mut faults = Faults(Vec::new());
    let config_path = dir.join("config.json");
    let config = faults.keep(ModelConfig::read(&config_path));
    let quantization = faults.keep(Quantization::read(dir)).flatten();
    if let Some(config) = &config {
        faults.keep(GenerationConfig::read(
            &dir.join("generation_config.json"),
            config,
        ));
    }
    if options.with_tokenizer {
        faults.keep(check_texts(dir, config.as_ref()));
        faults.keep(check_template(dir));
    }
    let max_len = config
        .as_ref()
        .and_then(|config| faults.keep(options.positions(config)));
    let checkpoint = faults.keep(Checkpoint::open(dir));
    let (Some(mut config), Some(checkpoint)) = (config, checkpoint) else {
        return faults.0;
    };
    let dtype = faults.keep(choose_dtype(options.dtype, &checkpoint, device));
    let fits = match (dtype, max_len) {
        (Some(dtype), Some(max_len)) => faults
            .keep(check_memory(
                &[Shard::whole(&config)],
                &checkpoint,
                dtype,
                max_len,
                std::slice::from_ref(device),
            ))
            .is_some(),
        _ => false,
    };
    let reads_values = fits || !checkpoint.is_sparse_file();
    if reads_values {
        faults.keep(use_own_head(&mut config, &checkpoint));
    }
    let mut ignored = |_: super::OpenProgress<'_>| {};
    let reader = LayerReader {
        checkpoint: &checkpoint,
        config_path: &config_path,
        quantization: quantization.as_ref(),
    };
    let dtype = dtype.unwrap_or(FloatDType::F32);
    let files = FileWeights::new(reader, dtype, device, &mut ignored);
    let mut source = CheckedWeights {
        files,
        device,
        faults,
        reads_values,
        on_layer: &mut on_layer,
    };
    // The rotary tables have one position here: the requested ones are checked above.
    if Model::assemble(&Shard::whole(&config), 1, device, &mut source).is_ok() && reads_values {
        source.faults.keep(source.files.refuse_surplus(&config));
    }
    source.faults.0
}

/// Checks that a text can be encoded to tokens of the model's vocabulary, and decoded from them.
fn check_texts(dir: &Path, config: Option<&ModelConfig>) -> Result<(), TextError> {
    let tokenizer = Tokenizer::open(&dir.join("tokenizer.json"))?;
    let tokenizer = match config {
        Some(config) => tokenizer.for_model(config.vocab_size),
        None => tokenizer,
    };
    tokenizer.decode(&tokenizer.encode("A text.")?).map(drop)
}

/// Checks that a question can be rendered, if there is a chat template.
fn check_template(dir: &Path) -> Result<(), TextError> {
    let Some(template) = ChatTemplate::open(dir)? else {
        return Ok(());
    };
    template
        .render(&[Message::user("A question?")], true)
        .map(drop)
}

struct Faults(Vec<ModelError>);

/// The error after [`MOST_FAULTS`] faults, which ends the check.
struct Enough;

impl Faults {
    fn keep<T>(&mut self, result: Result<T, impl Into<ModelError>>) -> Option<T> {
        result.map_err(|error| self.0.push(error.into())).ok()
    }

    fn go_on(&self) -> Result<(), Enough> {
        if self.0.len() < MOST_FAULTS {
            Ok(())
        } else {
            Err(Enough)
        }
    }
}

/// A source that checks the weights of the files without putting them on the device. A tensor of
/// one element takes the place of each weight.
struct CheckedWeights<'a> {
    files: FileWeights<'a>,
    device: &'a Device,
    faults: Faults,
    /// True to read values, false to read only headers.
    reads_values: bool,
    on_layer: &'a mut dyn FnMut(&str, &LayerFormat, &PlainWeight),
}

impl CheckedWeights<'_> {
    /// Checks the shape and the dtype of a float tensor.
    fn check(&mut self, name: String, shape: &[usize]) -> Result<(), Enough> {
        let checked = self
            .files
            .reader
            .checkpoint
            .tensor(&name)
            .and_then(|tensor| tensor.expect_shape(shape)?.expect_float());
        self.faults.keep(checked);
        self.files.read.insert(name);
        self.faults.go_on()
    }

    /// Marks the remaining tensors of a broken layer as used, so that they are not reported as
    /// surplus.
    fn skip(&mut self, layer: &str) {
        let prefix = format!("{layer}.");
        let tensors = self
            .files
            .reader
            .checkpoint
            .names()
            .filter(|tensor| tensor.starts_with(&prefix));
        self.files.read.extend(tensors.map(String::from));
    }

    fn placeholder<const D: usize>(&self) -> Param<Tensor<D>> {
        loaded(Tensor::zeros([1; D], (self.device, DType::F32)))
    }
}

impl WeightSource for CheckedWeights<'_> {
    type Error = Enough;

    fn embedding(&mut self, name: &str, shape: [usize; 2]) -> Result<Param<Tensor<2>>, Enough> {
        let float = self.files.refuse_quantized_embedding(name);
        match self.faults.keep(float) {
            Some(()) => self.check(format!("{name}.weight"), &shape)?,
            None => self.skip(name),
        }
        Ok(self.placeholder())
    }

    fn vector(
        &mut self,
        tensor: &str,
        length: usize,
        _: Range<usize>,
    ) -> Result<Param<Tensor<1>>, Enough> {
        self.check(tensor.into(), &[length])?;
        Ok(self.placeholder())
    }

    fn projection(&mut self, layer: &LayerShape) -> Result<Projection, Enough> {
        self.layer(layer)?;
        Ok(Projection::Dense(Linear {
            weight: self.placeholder(),
            bias: None,
        }))
    }

    fn contains(&self, name: &str) -> bool {
        self.files.contains(name)
    }

    fn projections(&mut self, layers: &[LayerShape]) -> Result<Vec<Projection>, Enough> {
        layers.iter().map(|layer| self.projection(layer)).collect()
    }

    fn experts(&mut self, block: &str, shape: &ExpertsShape) -> Result<Experts, Enough> {
        let mut first: Option<[LayerKind; 3]> = None;
        for layers in shape.experts_of(block) {
            let [gate, up] = &layers.gate_up;
            let kinds = [
                self.layer(gate)?,
                self.layer(up)?,
                self.layer(&layers.down)?,
            ];
            if kinds.contains(&LayerKind::Unknown) {
                continue;
            }
            if kinds[0] != kinds[1] {
                let layer = gate.name.clone();
                self.faults.0.push(ModelError::NotJoined { layer });
            }
            let first = first.get_or_insert_with(|| kinds.clone());
            let names = [&gate.name, &up.name, &layers.down.name];
            for ((name, kind), first) in names.into_iter().zip(&kinds).zip(first) {
                self.faults.0.extend(kind.differs(first, name));
            }
            if kinds[0].is_float() != kinds[2].is_float() {
                let layer = layers.down.name.clone();
                self.faults.0.push(ModelError::MixedExperts { layer });
            }
            self.faults.go_on()?;
        }
        Ok(Experts::Dense(DenseExperts {
            gate_up: self.placeholder(),
            down: self.placeholder(),
            gate_up_bias: None,
            down_bias: None,
            router: shape.router,
            epilogue: shape.epilogue,
        }))
    }
}

/// What the check finds of a layer.
#[derive(Clone, PartialEq, Eq)]
enum LayerKind {
    /// A fault, which was reported, or a layer whose values are not read.
    Unknown,
    Float,
    /// A quantised layer, and its order of rows if it has act-order.
    Quantized(WeightDescriptor, Option<Vec<u32>>),
}

impl LayerKind {
    fn is_float(&self) -> bool {
        *self == Self::Float
    }

    /// Returns the fault of an expert's layer that differs from that of the first expert.
    fn differs(&self, first: &Self, layer: &str) -> Option<ModelError> {
        let layer = layer.to_string();
        match (self, first) {
            // One kernel multiplies by weights with act-order and by others.
            (Self::Quantized(found, _), Self::Quantized(expected, _))
                if found.with_permutation(true) != expected.with_permutation(true) =>
            {
                Some(ModelError::OtherExpert {
                    layer,
                    expected: expected.to_string(),
                    found: found.to_string(),
                })
            }
            _ if self.is_float() != first.is_float() => Some(ModelError::MixedExperts { layer }),
            _ => None,
        }
    }
}

impl CheckedWeights<'_> {
    /// Checks a layer.
    fn layer(&mut self, layer: &LayerShape) -> Result<LayerKind, Enough> {
        let (name, [k, n]) = (layer.name.as_str(), layer.dims);
        let checkpoint = self.files.reader.checkpoint;
        let is_float = checkpoint
            .info(&format!("{name}.weight"))
            .is_some_and(|weight| is_float(weight.dtype));
        if !self.reads_values && checkpoint.contains_layer(name) && !is_float {
            self.skip(name);
            return Ok(LayerKind::Unknown);
        }
        let stack = self.files.reader.stack_of(layer);
        let read = self.files.reader.layer(layer);
        let kind = match self.faults.keep(read) {
            Some(HostLayer::Quantized {
                format,
                weight,
                tensors,
            }) => {
                (self.on_layer)(name, &format, &weight);
                self.files.finish(name, &tensors);
                let descriptor = weight.descriptor();
                let rows = weight.row_permutation().map(<[u32]>::to_vec);
                checkpoint.recycle(weight);
                LayerKind::Quantized(descriptor, rows)
            }
            Some(HostLayer::Float) => {
                match stack {
                    Some(part) if part.is_last() => {
                        let [experts, n] = part.dims;
                        let matrix = if part.shape.has_k_first {
                            [k, n]
                        } else {
                            [n, k]
                        };
                        self.check(part.name.clone(), &[experts, matrix[0], matrix[1]])?;
                    }
                    Some(_) => {}
                    None => self.check(format!("{name}.weight"), &[n, k])?,
                }
                LayerKind::Float
            }
            None => {
                self.skip(name);
                self.faults.go_on()?;
                LayerKind::Unknown
            }
        };
        match stack {
            Some(part) if layer.bias && part.is_last() => {
                self.check(format!("{}_bias", part.name), &part.dims)?;
            }
            None if layer.bias => self.check(format!("{name}.bias"), &[n])?,
            _ => {}
        }
        Ok(kind)
    }
}
