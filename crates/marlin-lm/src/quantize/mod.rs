//! Quantisation of a float folder to a folder with 4-bit or 8-bit projections.

mod calibrate;
mod format;
pub(crate) mod hidden;
mod options;
mod overrides;
mod plan;
mod progress;
pub(crate) mod resume;
mod samples;
mod scaling;
mod walk;

use std::ops::ControlFlow;
use std::path::Path;

use marlin_format::checkpoint::compressed_tensors::QuantizationConfig;
use marlin_format::checkpoint::{
    Checkpoint, CheckpointWriter, ConfigError, Quantization, TensorSpec, gptq,
};
use marlin_format::{QuantSpec, Sparsity};
use marlin_quant::{LayerLoss, QuantError};
use serde::{Deserialize, Serialize};

use self::overrides::Overrides;
use self::plan::{Plan, Target, plan};
use self::progress::BlockCount;
use self::resume::{Partial, arguments};
use self::walk::CalibrationWalk;
use crate::ModelError;
use crate::config::{ModelConfig, quantization_field, read_json};
use crate::folder::{FileWeights, choose_dtype};
use crate::model::Rope;

pub use self::calibrate::Calibration;
pub use self::format::FileFormat;
pub use self::hidden::HIDDEN_STATES_ON_DEVICE;
pub use self::options::{Method, QuantizeOptions};
pub use self::overrides::{Override, OverrideError};
pub use self::progress::QuantizeProgress;
pub use self::samples::{SampleOptions, calibration_samples};

/// The names of files that are copied if they exist: the tokenizer, the chat template and the
/// generation config.
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

/// The name of the output head, which is never quantised.
const HEAD: &str = "lm_head";

/// The outcome of a quantisation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuantizeReport {
    /// The quantised layers, in the order of the source.
    pub quantized: Vec<QuantizedLayer>,
    /// The names of the projections that were excluded.
    pub excluded: Vec<String>,
    /// The size of all tensors of the source, in bytes.
    pub source_bytes: usize,
    /// The size of all tensors of the target, in bytes.
    pub target_bytes: usize,
}

/// A layer that was quantised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuantizedLayer {
    /// The layer's name in the target.
    pub name: String,
    /// The number of input features.
    pub k: usize,
    /// The number of output features.
    pub n: usize,
    /// The spec of the quantised weight.
    pub spec: QuantSpec,
    /// The sparsity of the quantised weight: 2:4 also if only the float weight had this pattern.
    pub sparsity: Sparsity,
    /// The number of bits per weight in the file, including scales and zero points.
    pub bits_per_weight: f64,
    /// The number of groups that are rounded with a larger error than the bits cause, or to 0,
    /// since their scales are too small for the scale dtype
    /// ([`PlainWeight::underflows`](marlin_format::PlainWeight::underflows)).
    pub underflows: usize,
    /// The loss that a calibration-based quantiser reports for the layer.
    pub loss: Option<LayerLoss>,
}

/// Quantises the projections of a float Hugging Face folder, and writes a new folder in the format
/// of `options`.
///
/// The embedding, the norms and the head are copied unchanged, except for norms and biases that are
/// divided by AWQ's scales. `config.json` gets a `quantization_config`; the tokenizer and the
/// generation config are copied. The target appears when it is complete. `on_progress` is called
/// for every tensor; if it breaks, the run ends with [`ModelError::Stopped`].
///
/// Rounding has only one tensor at a time in memory. A calibration-based method has one block at a
/// time on the device, with up to [`HIDDEN_STATES_ON_DEVICE`] bytes of the samples' hidden states;
/// the host holds the others, if the device is not the host itself. They are a value for each token
/// and feature, and with GPTQ two. It keeps the blocks that are done beside the target, in a folder
/// `TARGET.partial`. A run that was stopped or killed goes on with them if its arguments are the
/// same, and its target is the same, bit for bit, where the device's arithmetic is. If it was
/// killed when its target was complete, its report is returned.
///
/// # Errors
/// Returns a [`ModelError`] that names the file or layer:
/// - before anything is written: for a source that is not a supported float model, or is already
///   quantised; for a layer that readers of the format do not accept; for an exclusion or override
///   that matches no layer; for a target that is not empty; for samples that the model does not
///   support;
/// - for weights or activations that are not finite;
/// - for the folder `TARGET.partial` of a run with other arguments.
pub fn quantize_folder(
    source: &Path,
    target: &Path,
    spec: &QuantSpec,
    options: &QuantizeOptions,
    mut on_progress: impl FnMut(QuantizeProgress<'_>) -> ControlFlow<()>,
) -> Result<QuantizeReport, ModelError> {
    let config_path = source.join("config.json");
    let llama = ModelConfig::read(&config_path)?;
    let mut config = read_json(&config_path)?;
    // An existing quantisation config is accepted only if it describes float weights.
    let is_float =
        || matches!(Quantization::read(source), Ok(Some(quantization)) if quantization.is_float());
    if quantization_field(&config).is_some() && !is_float() {
        return Err(ModelError::AlreadyQuantized { path: config_path });
    }
    // Other readers require the head in the config.
    let ignore = [vec![HEAD.to_string()], options.exclude.clone()].concat();
    let invalid = |source| ModelError::QuantizationConfig {
        path: target.join("config.json"),
        source,
    };
    let quantization = QuantizationConfig::new(*spec, ignore).map_err(invalid)?;
    let overrides = Overrides::new(*spec, &options.exclude, &options.overrides).map_err(invalid)?;

    let checkpoint = Checkpoint::open(source)?;
    let mut excluded = Vec::new();
    let plans = plan(&checkpoint, &llama, spec, options, overrides, &mut excluded)?;
    let calibration = options.method.calibration();
    let partial = match calibration {
        None => None,
        Some(calibration) => {
            check_samples(&llama, &calibration.samples)?;
            Some(Partial::new(
                target,
                arguments(&checkpoint, &config, spec, options, calibration)?,
            ))
        }
    };
    // A target that is not empty is refused before any weight is read, unless a run with these
    // arguments was killed when the target was complete.
    if let Err(taken) = CheckpointWriter::expect_free(target) {
        let Some(partial) = &partial else {
            return Err(taken.into());
        };
        let report = partial.report(options.format)?.ok_or(taken)?;
        partial.remove()?;
        return Ok(report);
    }
    let mut done = 0;
    let mut blocks_done = BlockCount::new(&plans);
    let mut on_tensor = |tensor: &str, is_quantized: bool| {
        done += 1;
        if is_quantized {
            blocks_done.add(tensor);
        }
        on_progress(QuantizeProgress {
            tensor,
            done,
            total: plans.len(),
            blocks_done: blocks_done.done(),
            blocks: blocks_done.blocks(),
        })
    };
    if let (Some(calibration), Some(partial)) = (calibration, &partial) {
        partial.open()?;
        calibrate(
            &checkpoint,
            &llama,
            &plans,
            options,
            calibration,
            partial,
            &mut |layer| on_tensor(layer, true),
        )?;
    }
    let mut writer = match &partial {
        None => CheckpointWriter::create(target)?,
        Some(partial) => partial.target_writer(target)?,
    };
    let mut blocks = partial.as_ref().map(Partial::reader);
    let specs: Vec<TensorSpec> = plans
        .iter()
        .flat_map(|plan| plan.specs(options.format))
        .collect();
    writer.declare(specs)?;

    let mut report = QuantizeReport {
        quantized: Vec::new(),
        excluded,
        source_bytes: 0,
        target_bytes: 0,
    };
    let quantizer = options.method.quantizer(options.sparsity);
    for plan in &plans {
        report.source_bytes += plan.bytes().len();
        let is_quantized = matches!(plan.target, Target::Quantize(_));
        let is_new = match &plan.target {
            Target::Copy(name) => {
                let scaled = match &mut blocks {
                    Some(blocks) => blocks.tensor(name)?,
                    None => None,
                };
                report.target_bytes += plan.bytes().len();
                writer.write_tensor(name, scaled.as_deref().unwrap_or(plan.bytes()))?;
                true
            }
            Target::Quantize(layer) => {
                let (plain, loss) = match &mut blocks {
                    Some(blocks) => blocks.layer(layer, &plan.spec)?,
                    None => {
                        let failed = |error| refused(layer, error);
                        (
                            quantizer
                                .quantize(&plan.weight()?, plan.k(), plan.n(), None, &plan.spec)
                                .map_err(failed)?
                                .weight,
                            None,
                        )
                    }
                };
                let underflows = plain.underflows(|| plan.weight())?;
                let (bytes, bits_per_weight) =
                    plan.write(layer, &plain, options.format, &mut writer)?;
                report.target_bytes += bytes;
                let (name, k, n, sparsity) = (layer.clone(), plan.k(), plan.n(), plain.sparsity());
                report.quantized.push(QuantizedLayer {
                    name,
                    k,
                    n,
                    spec: plan.spec,
                    sparsity,
                    bits_per_weight,
                    underflows,
                    loss,
                });
                partial.is_none()
            }
        };
        if is_new && on_tensor(plan.view.name(), is_quantized).is_break() {
            return Err(ModelError::Stopped);
        }
    }
    if let Some(config) = config.as_object_mut() {
        let others: Vec<(String, QuantSpec)> = report
            .quantized
            .iter()
            .filter(|layer| layer.spec != *spec)
            .map(|layer| (layer.name.clone(), layer.spec))
            .collect();
        let compressed_tensors =
            || of_layers(quantization.clone(), &report.excluded, &others).map_err(invalid);
        let quantization = match options.format {
            FileFormat::CompressedTensors => compressed_tensors()?.to_json(),
            FileFormat::Marlin24 => compressed_tensors()?.as_marlin_24().to_json(),
            FileFormat::Gptq => {
                // A weight of one group has no permutation.
                let has_groups =
                    |layer: &QuantizedLayer| layer.spec.scales.group.count(layer.k) > 1;
                let act_order =
                    options.method.act_order() && report.quantized.iter().any(has_groups);
                gptq::quantization_config(spec, act_order, false, &report.excluded, &others)
            }
        };
        Quantization::CONFIG_FIELDS
            .iter()
            .for_each(|field| drop(config.remove(*field)));
        config.insert("quantization_config".into(), quantization);
    }
    writer.write_file("config.json", format!("{config:#}\n").as_bytes())?;
    for name in COPIED_FILES {
        let path = source.join(name);
        if path.is_file() {
            writer.copy_file(&path)?;
        }
    }
    if let Some(partial) = &partial {
        partial.keep_report(options.format, &report)?;
    }
    writer.finish()?;
    if let Some(partial) = &partial {
        partial.remove()?;
    }
    tracing::info!(source = %source.display(), target = %target.display(), %spec, layers = report.quantized.len(), "quantised a Llama");
    Ok(report)
}

/// Returns a config that also lists the excluded layers that it does not ignore yet, and the layers
/// with other specs.
fn of_layers(
    config: QuantizationConfig,
    excluded: &[String],
    others: &[(String, QuantSpec)],
) -> Result<QuantizationConfig, ConfigError> {
    let skipped: Vec<String> = excluded
        .iter()
        .filter(|name| !config.ignores(name))
        .cloned()
        .collect();
    let mut config = config.with_ignored(skipped)?;
    let mut rest = others.to_vec();
    while let [(_, spec), ..] = rest[..] {
        let layers = rest
            .extract_if(.., |(_, of)| *of == spec)
            .map(|(name, _)| name)
            .collect();
        config = config.with_layers(spec, false, layers);
    }
    Ok(config)
}

/// Checks that a model supports all samples.
fn check_samples(config: &ModelConfig, samples: &[Vec<u32>]) -> Result<(), ModelError> {
    let limit = config.positions();
    for (index, sample) in samples.iter().enumerate() {
        if sample.is_empty() || sample.len() > limit {
            return Err(ModelError::SampleLength {
                sample: index,
                tokens: sample.len(),
                limit,
            });
        }
        if let Some((position, &token)) = sample
            .iter()
            .enumerate()
            .find(|&(_, &token)| token as usize >= config.vocab_size)
        {
            return Err(ModelError::Token {
                token,
                position,
                vocab_size: config.vocab_size,
            });
        }
    }
    Ok(())
}

/// Returns the error of a layer that cannot be quantised.
fn refused(layer: &str, error: QuantError) -> ModelError {
    match error {
        QuantError::Format(source) => ModelError::Quantize {
            layer: layer.into(),
            source,
        },
        source => ModelError::Calibrate {
            layer: layer.into(),
            source,
        },
    }
}

/// Quantises all blocks that `partial` does not have yet.
fn calibrate(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    plans: &[Plan<'_>],
    options: &QuantizeOptions,
    calibration: &Calibration,
    partial: &Partial,
    on_tensor: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<(), ModelError> {
    let Calibration {
        samples,
        device,
        dtype,
    } = calibration;
    let longest = samples.iter().map(Vec::len).max().unwrap_or(1);
    let dtype = choose_dtype(*dtype, checkpoint, device)?;
    let quantizer = options.method.quantizer(options.sparsity);
    let mut on_read = |_: crate::OpenProgress<'_>| {};
    let config_path = checkpoint.dir().join("config.json");
    let mut source = FileWeights::new(checkpoint, &config_path, None, dtype, device, &mut on_read);
    let rope = Rope::new(config, longest, device);
    let awq = options.method.awq();
    let mut walk = CalibrationWalk {
        config,
        plans,
        quantizer: &*quantizer,
        awq,
        device,
        dtype,
        rope,
        batches: Vec::new(),
        pending: None,
        saving: None,
    };
    walk.embed(samples, &mut source)?;
    let mut on_layer = |layer: &LayerLoss| {
        tracing::debug!(?layer, "quantised");
        on_tensor(&layer.layer)
    };
    let walked = (0..config.num_hidden_layers)
        .try_for_each(|block| walk.block(block, partial, &mut source, &mut on_layer));
    // The previous block is completed even if the run is stopped.
    walk.saved()?;
    walked?;
    // The hidden states and their memory are released before the target is written.
    walk.batches.clear();
    walk.pending = None;
    walk.release_memory("model.norm")
}
