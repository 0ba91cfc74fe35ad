//! The steps of a quantisation from folder to folder: the checks of its arguments, and the writing
//! of the target.

use std::path::Path;

use marlin_format::checkpoint::compressed_tensors::QuantizationConfig;
use marlin_format::checkpoint::{
    Checkpoint, CheckpointWriter, ConfigError, Quantization, TensorSpec, gptq,
};
use marlin_format::{PlainWeight, QuantSpec};
use marlin_quant::{LayerLoss, Quantizer};
use serde_json::Value;

use super::calibrate::check_samples;
use super::overrides::Overrides;
use super::plan::{Plan, Target};
use super::resume::{Partial, arguments};
use super::{
    Calibration, FileFormat, HEAD, QuantizeOptions, QuantizeReport, QuantizedLayer, refused,
};
use crate::ModelError;
use crate::config::{ModelConfig, quantization_field, read_json};

/// The names of files that are copied if they exist: the tokenizer, the chat template and the
/// generation config.
pub(crate) const COPIED_FILES: [&str; 10] = [
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

/// A quantisation from folder to folder, with arguments that were checked.
pub(super) struct FolderRun<'a> {
    source: &'a Path,
    target: &'a Path,
    spec: &'a QuantSpec,
    options: &'a QuantizeOptions,
    /// The config of the float model.
    pub(super) model: ModelConfig,
    /// The source's `config.json`.
    config: Value,
    /// The config of the quantised weights, without the layers that depend on the model.
    quantization: QuantizationConfig,
}

impl<'a> FolderRun<'a> {
    /// Reads the source's config and checks the arguments, except those that depend on the
    /// source's tensors. Also returns the overrides.
    pub(super) fn new(
        source: &'a Path,
        target: &'a Path,
        spec: &'a QuantSpec,
        options: &'a QuantizeOptions,
    ) -> Result<(Self, Overrides), ModelError> {
        let config_path = source.join("config.json");
        let model = ModelConfig::read(&config_path)?;
        let config = read_json(&config_path)?;
        // An existing quantisation config is accepted only if it describes float weights.
        let is_float = || match Quantization::read(source) {
            Ok(Some(quantization)) => quantization.is_float(),
            _ => false,
        };
        if quantization_field(&config).is_some() && !is_float() {
            return Err(ModelError::AlreadyQuantized { path: config_path });
        }
        // Other readers require the float layers in the config: head and routers.
        let head = options.head.is_none().then(|| HEAD.to_string());
        let float = head.into_iter().chain(routers(&model));
        let ignore = float.chain(options.exclude.clone()).collect();
        let invalid = |error| invalid(target, error);
        let quantization = QuantizationConfig::new(*spec, ignore).map_err(invalid)?;
        let overrides =
            Overrides::new(*spec, &options.exclude, &options.overrides).map_err(invalid)?;
        let run = Self {
            source,
            target,
            spec,
            options,
            model,
            config,
            quantization,
        };
        Ok((run, overrides))
    }

    /// Checks the samples, and names the folder of completed blocks.
    pub(super) fn partial(
        &self,
        checkpoint: &Checkpoint,
        calibration: &Calibration,
    ) -> Result<Partial, ModelError> {
        check_samples(&self.model, &calibration.samples)?;
        let arguments = arguments(
            checkpoint,
            &self.config,
            self.spec,
            self.options,
            calibration,
        )?;
        Ok(Partial::new(self.target, arguments))
    }

    /// Checks that the target is free before any weight is read. If a run with these arguments was
    /// killed when the target was complete, returns its report.
    pub(super) fn completed(
        &self,
        partial: Option<&Partial>,
    ) -> Result<Option<QuantizeReport>, ModelError> {
        let Err(taken) = CheckpointWriter::expect_free(self.target) else {
            return Ok(None);
        };
        let Some(partial) = partial else {
            return Err(taken.into());
        };
        let report = partial.report(self.options.format)?.ok_or(taken)?;
        partial.remove()?;
        Ok(Some(report))
    }

    /// Creates a writer of the target, with the tensors of all plans declared.
    pub(super) fn writer(
        &self,
        plans: &[Plan<'_>],
        partial: Option<&Partial>,
    ) -> Result<CheckpointWriter, ModelError> {
        let mut writer = match partial {
            None => CheckpointWriter::create(self.target)?,
            Some(partial) => partial.target_writer(self.target)?,
        };
        let specs: Vec<TensorSpec> = plans
            .iter()
            .flat_map(|plan| plan.specs(self.options.format))
            .collect();
        writer.declare(specs)?;
        Ok(writer)
    }

    /// Writes the tensors of all plans: those of completed blocks if there is a calibration,
    /// otherwise weights that are rounded one by one. `on_tensor` is called for each tensor, and
    /// whether it is quantised, except for those of the calibration.
    pub(super) fn write_tensors(
        &self,
        plans: &[Plan<'_>],
        excluded: Vec<String>,
        partial: Option<&Partial>,
        writer: &mut CheckpointWriter,
        on_tensor: &mut dyn FnMut(&str, bool) -> Result<(), ModelError>,
    ) -> Result<QuantizeReport, ModelError> {
        let mut report = QuantizeReport {
            quantized: Vec::new(),
            excluded,
            source_bytes: 0,
            target_bytes: 0,
        };
        let mut blocks = partial.map(Partial::reader);
        let quantizer = self.options.method.quantizer(self.options.sparsity);
        let head_quantizer = self.options.method.head_quantizer();
        for plan in plans {
            if !plan.is_copied_too {
                report.source_bytes += plan.size_bytes();
            }
            let is_quantized = matches!(plan.target, Target::Quantize(_));
            let is_new = match &plan.target {
                Target::Copy(name) => {
                    let scaled = match &mut blocks {
                        Some(blocks) => blocks.tensor(name)?,
                        None => None,
                    };
                    report.target_bytes += plan.size_bytes();
                    match scaled {
                        Some(scaled) => writer.write_tensor(name, &scaled)?,
                        None => writer.write_tensor(name, &plan.bytes()?)?,
                    }
                    true
                }
                Target::Quantize(layer) => {
                    let is_head = layer == HEAD;
                    let (weight, loss) = match &mut blocks {
                        _ if is_head => (round(layer, plan, &head_quantizer)?, None),
                        Some(blocks) => blocks.layer(layer, &plan.spec)?,
                        None => (round(layer, plan, &*quantizer)?, None),
                    };
                    let (written, bytes) = self.write_layer(layer, plan, &weight, loss, writer)?;
                    report.target_bytes += bytes;
                    report.quantized.push(written);
                    is_head || partial.is_none()
                }
            };
            if is_new {
                on_tensor(plan.view.name(), is_quantized)?;
            }
        }
        Ok(report)
    }

    /// Writes a quantised layer. Returns its report, and its size in bytes.
    fn write_layer(
        &self,
        layer: &str,
        plan: &Plan<'_>,
        weight: &PlainWeight,
        loss: Option<LayerLoss>,
        writer: &mut CheckpointWriter,
    ) -> Result<(QuantizedLayer, usize), ModelError> {
        let underflows = weight.underflows(|| plan.weight())?;
        let (bytes, bits_per_weight) = plan.write(layer, weight, self.options.format, writer)?;
        let written = QuantizedLayer {
            name: layer.into(),
            k: plan.k(),
            n: plan.n(),
            spec: plan.spec,
            sparsity: weight.sparsity(),
            bits_per_weight,
            underflows,
            loss,
        };
        Ok((written, bytes))
    }

    /// Writes `config.json` with the config of the quantised weights.
    pub(super) fn write_config(
        &self,
        report: &QuantizeReport,
        writer: &mut CheckpointWriter,
    ) -> Result<(), ModelError> {
        let mut config = self.config.clone();
        if let Some(config) = config.as_object_mut() {
            let quantization = self.quantization_of(report)?;
            Quantization::CONFIG_FIELDS
                .iter()
                .for_each(|field| drop(config.remove(*field)));
            config.insert("quantization_config".into(), quantization);
            if report.has_head() {
                config.insert("tie_word_embeddings".into(), false.into());
            }
        }
        Ok(writer.write_file("config.json", format!("{config:#}\n").as_bytes())?)
    }

    /// Returns the config of the quantised weights, in the form of the target's format.
    fn quantization_of(&self, report: &QuantizeReport) -> Result<Value, ModelError> {
        let others: Vec<(String, QuantSpec)> = report
            .quantized
            .iter()
            .filter(|layer| layer.spec != *self.spec)
            .map(|layer| (layer.name.clone(), layer.spec))
            .collect();
        let compressed_tensors = || {
            let config = match report.spec_of_experts() {
                Some(spec) => self.quantization.clone().with_experts(spec),
                None => self.quantization.clone(),
            };
            of_layers(config, &report.excluded, &others)
                .map_err(|error| invalid(self.target, error))
        };
        Ok(match self.options.format {
            FileFormat::CompressedTensors => compressed_tensors()?.to_json(),
            FileFormat::Marlin24 => compressed_tensors()?.as_marlin_24().to_json(),
            FileFormat::Gptq => {
                // A weight of one group has no permutation.
                let has_groups =
                    |layer: &QuantizedLayer| layer.spec.scales.group.count(layer.k) > 1;
                let act_order =
                    self.options.method.act_order() && report.quantized.iter().any(has_groups);
                gptq::quantization_config(
                    self.spec,
                    act_order,
                    report.has_head(),
                    &report.excluded,
                    &others,
                )
            }
        })
    }

    /// Copies the tokenizer, the chat template and the generation config.
    pub(super) fn copy_files(&self, writer: &mut CheckpointWriter) -> Result<(), ModelError> {
        for name in COPIED_FILES {
            let path = self.source.join(name);
            if path.is_file() {
                writer.copy_file(&path)?;
            }
        }
        Ok(())
    }

    /// Puts the target in its place, and then removes the folder of completed blocks.
    pub(super) fn finish(
        &self,
        report: &QuantizeReport,
        partial: Option<&Partial>,
        writer: CheckpointWriter,
    ) -> Result<(), ModelError> {
        if let Some(partial) = partial {
            partial.keep_report(self.options.format, report)?;
        }
        writer.finish()?;
        if let Some(partial) = partial {
            partial.remove()?;
        }
        tracing::info!(
            source = %self.source.display(),
            target = %self.target.display(),
            spec = %self.spec,
            layers = report.quantized.len(),
            "quantised a Llama"
        );
        Ok(())
    }
}

/// Returns the error of a config for `target` that readers do not accept.
fn invalid(target: &Path, source: ConfigError) -> ModelError {
    ModelError::QuantizationConfig {
        path: target.join("config.json"),
        source,
    }
}

/// Rounds the weight of a layer.
fn round(
    layer: &str,
    plan: &Plan<'_>,
    quantizer: &dyn Quantizer,
) -> Result<PlainWeight, ModelError> {
    let found = quantizer.quantize(&plan.weight()?, plan.k(), plan.n(), None, &plan.spec);
    Ok(found.map_err(|error| refused(layer, error))?.weight)
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

/// Returns the names of the routers of a model, and of the gates of its shared experts.
fn routers(model: &ModelConfig) -> impl Iterator<Item = String> {
    (0..model.num_hidden_layers).flat_map(|block| {
        let shape = model.block(block);
        let block = format!("model.layers.{block}");
        let layers = shape.experts().map(|experts| {
            let router = experts.router_of(&block);
            std::iter::once(router.name).chain(experts.shared_gate_of(&block).map(|gate| gate.name))
        });
        layers.into_iter().flatten().collect::<Vec<_>>()
    })
}
