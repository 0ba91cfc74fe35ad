//! Quantisation of a float folder to a folder with 4-bit or 8-bit projections.

mod block;
mod calibrate;
mod experts;
mod folder;
mod format;
pub(crate) mod hidden;
mod options;
mod overrides;
mod plan;
mod progress;
mod readers;
pub(crate) mod resume;
mod samples;
mod scaling;
mod walk;

use std::ops::ControlFlow;
use std::path::Path;

use marlin_format::checkpoint::Checkpoint;
use marlin_format::checkpoint::compressed_tensors::is_expert;
use marlin_format::{QuantSpec, Sparsity};
use marlin_quant::{LayerError, LayerLoss, QuantError};
use serde::{Deserialize, Serialize};

use self::calibrate::calibrate;
#[cfg(all(test, feature = "hub"))]
pub(crate) use self::folder::COPIED_FILES;
use self::folder::FolderRun;
use self::plan::plan;
use self::progress::BlockCount;
use crate::ModelError;

pub use self::calibrate::Calibration;
pub use self::format::FileFormat;
pub use self::hidden::HIDDEN_STATES_ON_DEVICE;
pub use self::options::{Method, QuantizeOptions};
pub use self::overrides::{Override, OverrideError};
pub use self::progress::QuantizeProgress;
pub use self::samples::{SampleOptions, calibration_samples};

/// The name of the output head.
const HEAD: &str = "lm_head";
/// The name of the embedding, which is the head of a model whose head is tied.
const EMBEDDING: &str = "model.embed_tokens";

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

impl QuantizeReport {
    /// Returns true if the output head was quantised.
    fn has_head(&self) -> bool {
        self.quantized.iter().any(|layer| layer.name == HEAD)
    }

    /// Returns the spec of the experts, if all of them are quantised and have the same.
    fn spec_of_experts(&self) -> Option<QuantSpec> {
        if self.excluded.iter().any(|layer| is_expert(layer)) {
            return None;
        }
        let experts = self.quantized.iter().filter(|layer| is_expert(&layer.name));
        let mut specs = experts.map(|layer| layer.spec);
        let first = specs.next()?;
        specs.all(|spec| spec == first).then_some(first)
    }
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
///   quantised; for a layer that readers of the format do not accept; for experts of a block with
///   different settings; for an exclusion or override that matches no layer; for a target that is
///   not empty; for samples that the model does not support;
/// - for weights or activations that are not finite;
/// - for the folder `TARGET.partial` of a run with other arguments.
pub fn quantize_folder(
    source: &Path,
    target: &Path,
    spec: &QuantSpec,
    options: &QuantizeOptions,
    mut on_progress: impl FnMut(QuantizeProgress<'_>) -> ControlFlow<()>,
) -> Result<QuantizeReport, ModelError> {
    let (run, overrides) = FolderRun::new(source, target, spec, options)?;
    let checkpoint = Checkpoint::open(source)?;
    let mut excluded = Vec::new();
    let plans = plan(
        &checkpoint,
        &run.model,
        spec,
        options,
        overrides,
        &mut excluded,
    )?;
    let calibration = options.method.calibration();
    let partial = calibration
        .map(|calibration| run.partial(&checkpoint, calibration))
        .transpose()?;
    if let Some(report) = run.completed(partial.as_ref())? {
        return Ok(report);
    }
    let mut done = 0;
    let mut blocks = BlockCount::new(&plans);
    let mut on_tensor = |tensor: &str, is_quantized: bool| {
        done += 1;
        if is_quantized {
            blocks.add(tensor);
        }
        match on_progress(QuantizeProgress {
            tensor,
            done,
            total: plans.len(),
            blocks_done: blocks.done(),
            blocks: blocks.blocks(),
        }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ModelError::Stopped),
        }
    };
    if let (Some(calibration), Some(partial)) = (calibration, &partial) {
        partial.open()?;
        calibrate(
            &checkpoint,
            &run.model,
            &plans,
            options,
            calibration,
            partial,
            &mut |layer| on_tensor(layer, true),
        )?;
    }
    let mut writer = run.writer(&plans, partial.as_ref())?;
    let report = run.write_tensors(
        &plans,
        excluded,
        partial.as_ref(),
        &mut writer,
        &mut on_tensor,
    )?;
    run.write_config(&report, &mut writer)?;
    run.copy_files(&mut writer)?;
    run.finish(&report, partial.as_ref(), writer)?;
    Ok(report)
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

impl From<LayerError> for ModelError {
    fn from(LayerError { layer, source }: LayerError) -> Self {
        refused(&layer, source)
    }
}
