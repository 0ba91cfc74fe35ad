//! A float folder to a folder with 4-bit or 8-bit projections.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

use marlin_format::checkpoint::compressed_tensors::{self, QuantizationConfig};
use marlin_format::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriter, Quantization, TensorData, TensorSpec, TensorView, gptq, marlin24,
};
use marlin_format::{FormatError, PlainWeight, QuantSpec, Sparsity, WeightDescriptor, WeightFormat, memory_short_of, quantize};

use crate::LlamaError;
use crate::config::{LlamaConfig, MLP_INPUTS_APART, quantization_field, read_json};
use crate::model::QUANTIZABLE_PROJECTIONS;

/// Files that are copied where they are there: all that concerns texts.
const COPIED_FILES: [&str; 10] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// The form in which a quantised folder is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FileFormat {
    /// compressed-tensors, pack-quantized: llm-compressor's form.
    #[default]
    CompressedTensors,
    /// GPTQ, version 2: GPTQModel's form. K and N of every layer fill whole words. The `gate_up_proj` of Phi-3 is two layers,
    /// `gate_proj` and `up_proj`, as GPTQModel has them from 7.0 on; transformers takes Phi-3 in compressed-tensors' form.
    Gptq,
    /// compressed-tensors, marlin-24: two of every four weights. Weights are 2:4, symmetric, in groups of 128 or a whole column; K is a multiple of
    /// 32, N of 64.
    Marlin24,
}

impl FileFormat {
    /// Checks that readers of this form accept a layer [K, N].
    fn check(self, layer: &str, k: usize, n: usize, spec: &QuantSpec) -> Result<(), LlamaError> {
        let multiple = spec.bits.per_word();
        match self {
            Self::Marlin24 => marlin24::check(k, n, spec).map_err(|source| LlamaError::Quantize { layer: layer.into(), source }),
            Self::Gptq if !(k.is_multiple_of(multiple) && n.is_multiple_of(multiple)) => {
                Err(LlamaError::GptqShape { layer: layer.into(), multiple, k, n })
            }
            _ => Ok(()),
        }
    }

    /// The layers that `layer` is in a file of this form.
    fn names(self, layer: &str) -> Vec<String> {
        match (self, layer.strip_suffix("gate_up_proj")) {
            (Self::Gptq, Some(parent)) => MLP_INPUTS_APART.iter().map(|name| format!("{parent}{name}")).collect(),
            _ => vec![layer.into()],
        }
    }

    fn tensor_specs(self, layer: &str, k: usize, n: usize, spec: &QuantSpec) -> Vec<TensorSpec> {
        match self {
            Self::CompressedTensors => compressed_tensors::tensor_specs(layer, k, n, spec, false),
            Self::Gptq => gptq::tensor_specs(layer, k, n, spec),
            Self::Marlin24 => marlin24::tensor_specs(layer, k, n, spec),
        }
    }

    /// The weight with the values that a file of this form stores.
    fn stored(self, weight: &PlainWeight) -> Result<Cow<'_, PlainWeight>, FormatError> {
        match self {
            Self::CompressedTensors | Self::Gptq => Ok(weight.to_dense()),
            Self::Marlin24 => weight.to_two_four(),
        }
    }

    /// The tensors of a layer.
    fn tensors_of(self, layer: &str, stored: &PlainWeight) -> Result<Vec<TensorData>, FormatError> {
        match self {
            Self::CompressedTensors => Ok(compressed_tensors::tensors_of(layer, stored)),
            Self::Gptq => Ok(gptq::tensors_of(layer, stored)),
            Self::Marlin24 => marlin24::tensors_of(layer, stored),
        }
    }
}

/// The layers to quantise, and the form to write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuantizeOptions {
    /// The form of the files.
    pub format: FileFormat,
    /// 2:4 prunes every layer before it is rounded: of every four weights of an output feature the two of the largest magnitude stay.
    pub sparsity: Sparsity,
    /// Layers that stay as they are: names such as `model.layers.0.mlp.down_proj`, or `re:` and a regular expression that matches from the start
    /// of the name.
    pub exclude: Vec<String>,
}

/// The progress of a quantisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizeProgress<'a> {
    /// The tensor of the source that was written in full or in part.
    pub tensor: &'a str,
    /// Tensors and parts that are done.
    pub done: usize,
    /// All of them.
    pub total: usize,
}

/// The outcome of a quantisation.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizeReport {
    /// The layers that are quantised now, as they come in the source.
    pub quantized: Vec<QuantizedLayer>,
    /// Projections that were excluded.
    pub excluded: Vec<String>,
    /// Bytes of all tensors of the source.
    pub source_bytes: usize,
    /// Bytes of all tensors of the target.
    pub target_bytes: usize,
}

/// A layer that was quantised.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedLayer {
    /// Its name.
    pub name: String,
    /// Input features.
    pub k: usize,
    /// Output features.
    pub n: usize,
    /// The pattern of its values: 2:4 also where the float weight was that.
    pub sparsity: Sparsity,
    /// Bits for each weight as the file holds it, scales and zero points counted.
    pub bits_per_weight: f64,
}

/// The plan for a tensor of the source, or for some of its rows.
struct Plan<'a> {
    view: TensorView<'a>,
    /// The rows: those of a layer that has a name of its own in the target.
    rows: Range<usize>,
    target: Target,
}

/// The tensors to write.
enum Target {
    /// A tensor of this name, as it is.
    Copy(String),
    /// A layer of this name and K.
    Quantize { layer: String, k: usize },
}

/// Rounds the projections of a float Hugging Face folder to the nearest values of the spec's bits, into a new folder in the options' form:
/// compressed-tensors or GPTQ.
///
/// Embedding, norms and head are copied as they are, `config.json` gains its `quantization_config`, tokenizer and generation config are copied.
/// Only one tensor at a time is in memory. The target appears when it is complete.
///
/// # Errors
/// A [`LlamaError`] that names the file or layer: a source that is no float Llama, or is quantised already; a layer that readers
/// of the form do not take, before anything is written; weights that are not finite; a target with something in it.
pub fn quantize_folder(
    source: &Path,
    target: &Path,
    spec: &QuantSpec,
    options: &QuantizeOptions,
    mut on_progress: impl FnMut(QuantizeProgress<'_>),
) -> Result<QuantizeReport, LlamaError> {
    let config_path = source.join("config.json");
    LlamaConfig::read(&config_path)?;
    let mut config = read_json(&config_path)?;
    // What is there may only say how float weights are stored.
    let is_float = || matches!(Quantization::read(source), Ok(Some(quantization)) if quantization.is_float());
    if quantization_field(&config).is_some() && !is_float() {
        return Err(LlamaError::AlreadyQuantized { path: config_path });
    }
    // The head is never quantised; other readers require it in the config.
    let ignore = [vec!["lm_head".to_string()], options.exclude.clone()].concat();
    let quantization = QuantizationConfig::new(*spec, ignore)
        .map_err(|error| LlamaError::QuantizationConfig { path: target.join("config.json"), source: error })?;

    let checkpoint = Checkpoint::open(source)?;
    let mut excluded = Vec::new();
    let plans = plan(&checkpoint, spec, options, &quantization, &mut excluded)?;
    let mut writer = CheckpointWriter::create(target)?;
    let specs: Vec<TensorSpec> = plans.iter().flat_map(|plan| plan.specs(spec, options.format)).collect();
    writer.declare(specs)?;

    let mut report = QuantizeReport { quantized: Vec::new(), excluded, source_bytes: 0, target_bytes: 0 };
    for (index, plan) in plans.iter().enumerate() {
        let view = plan.run(spec, options, &mut writer, &mut report)?;
        on_progress(QuantizeProgress { tensor: view.name(), done: index + 1, total: plans.len() });
    }
    if let Some(config) = config.as_object_mut() {
        let quantization = match options.format {
            FileFormat::CompressedTensors => quantization.to_json(),
            FileFormat::Marlin24 => quantization.as_marlin_24().to_json(),
            FileFormat::Gptq => gptq::quantization_config(spec, false, false, &report.excluded),
        };
        Quantization::CONFIG_FIELDS.iter().for_each(|field| drop(config.remove(*field)));
        config.insert("quantization_config".into(), quantization);
    }
    writer.write_file("config.json", format!("{config:#}\n").as_bytes())?;
    for name in COPIED_FILES {
        let path = source.join(name);
        if path.is_file() {
            writer.copy_file(&path)?;
        }
    }
    writer.finish()?;
    tracing::info!(source = %source.display(), target = %target.display(), %spec, layers = report.quantized.len(), "quantised a Llama");
    Ok(report)
}

/// Plans every tensor. Refuses layers that cannot be written.
fn plan<'a>(
    checkpoint: &'a Checkpoint,
    spec: &QuantSpec,
    options: &QuantizeOptions,
    quantization: &QuantizationConfig,
    excluded: &mut Vec<String>,
) -> Result<Vec<Plan<'a>>, LlamaError> {
    let QuantizeOptions { format, sparsity, .. } = *options;
    let mut plans = Vec::new();
    for name in checkpoint.names() {
        let view = checkpoint.tensor(name)?;
        if name.ends_with(".weight_packed") || name.ends_with(".qweight") {
            return Err(LlamaError::AlreadyQuantized { path: view.path().into() });
        }
        let projection = name.strip_suffix(".weight").filter(|layer| is_projection(layer));
        let (Some(source), &[n, k]) = (projection, view.shape()) else {
            plans.push(Plan { view, rows: 0..view.shape().first().copied().unwrap_or(1), target: Target::Copy(name.into()) });
            continue;
        };
        let layers = format.names(source);
        let n = n / layers.len();
        for (index, layer) in layers.into_iter().enumerate() {
            let rows = index * n..(index + 1) * n;
            if quantization.ignores(source) || quantization.ignores(&layer) {
                plans.push(Plan { view, rows, target: Target::Copy(format!("{layer}.weight")) });
                excluded.push(layer);
            } else {
                let descriptor = WeightDescriptor::plain(WeightFormat::dense(*spec).with_sparsity(sparsity), k, n);
                descriptor.check().map_err(|source| LlamaError::Quantize { layer: layer.clone(), source })?;
                // Its values in f32 as they are and transposed, and their quantised ones.
                let needed = view.shape().iter().product::<usize>().saturating_mul(4 + 4 + 1);
                if let Some(available) = memory_short_of(needed) {
                    return Err(CheckpointError::LayerTooLarge { layer, needed, available }.into());
                }
                format.check(&layer, k, n, spec)?;
                plans.push(Plan { view, rows, target: Target::Quantize { layer, k } });
            }
        }
    }
    Ok(plans)
}

/// Returns true if a layer of this name is one of the model's projections.
fn is_projection(layer: &str) -> bool {
    let name = layer.rsplit('.').next().unwrap_or(layer);
    layer.starts_with("model.layers.") && QUANTIZABLE_PROJECTIONS.contains(&name)
}

impl<'a> Plan<'a> {
    fn specs(&self, spec: &QuantSpec, format: FileFormat) -> Vec<TensorSpec> {
        match &self.target {
            Target::Copy(name) => {
                let mut shape = self.view.shape().to_vec();
                if let Some(rows) = shape.first_mut() {
                    *rows = self.rows.len();
                }
                vec![TensorSpec::new(name, self.view.dtype(), shape)]
            }
            Target::Quantize { layer, k } => format.tensor_specs(layer, *k, self.rows.len(), spec),
        }
    }

    fn run(
        &self,
        spec: &QuantSpec,
        options: &QuantizeOptions,
        writer: &mut CheckpointWriter,
        report: &mut QuantizeReport,
    ) -> Result<TensorView<'a>, LlamaError> {
        let Self { view, rows, target } = self;
        let row_bytes = view.bytes().len() / view.shape().first().map_or(1, |&rows| rows.max(1));
        let bytes = &view.bytes()[rows.start * row_bytes..rows.end * row_bytes];
        report.source_bytes += bytes.len();
        match target {
            Target::Copy(name) => {
                report.target_bytes += bytes.len();
                writer.write_tensor(name, bytes)?;
            }
            Target::Quantize { layer, k } => {
                let (k, n) = (*k, rows.len());
                let weight = transposed(&view.to_f32()?[rows.start * k..rows.end * k], n, k);
                let failed = |source| LlamaError::Quantize { layer: layer.clone(), source };
                let plain = quantize(weight, k, n, spec, options.sparsity).map_err(failed)?;
                let stored = options.format.stored(&plain).map_err(failed)?;
                for tensor in options.format.tensors_of(layer, &stored).map_err(failed)? {
                    report.target_bytes += tensor.bytes.len();
                    writer.write_tensor(&tensor.spec.name, &tensor.bytes)?;
                }
                report.quantized.push(QuantizedLayer {
                    name: layer.clone(),
                    k,
                    n,
                    sparsity: plain.sparsity(),
                    bits_per_weight: stored.bits_per_weight(),
                });
            }
        }
        Ok(*view)
    }
}

/// `[rows, columns]` to `[columns, rows]`, in blocks that stay in the cache.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    const BLOCK: usize = 32;
    let mut out = vec![0.0; values.len()];
    for first_row in (0..rows).step_by(BLOCK) {
        for first_column in (0..columns).step_by(BLOCK) {
            for row in first_row..rows.min(first_row + BLOCK) {
                for column in first_column..columns.min(first_column + BLOCK) {
                    out[column * rows + row] = values[row * columns + column];
                }
            }
        }
    }
    out
}
