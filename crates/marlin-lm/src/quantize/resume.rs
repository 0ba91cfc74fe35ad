//! The work of an incomplete run: the quantised blocks, in a folder beside the target.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::FloatDType;
use marlin_format::checkpoint::{Checkpoint, CheckpointWriter, compressed_tensors};
use marlin_format::{PlainWeight, QuantSpec};
use marlin_quant::LayerLoss;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::{Calibration, FileFormat, Method, QuantizeOptions, QuantizeReport};
use crate::ModelError;
use crate::config::read_json;

const RUN: &str = "run.json";
const LOSSES: &str = "losses.json";

/// The field of the run's file with the report of a run whose target is complete, or only has to be
/// renamed.
const COMPLETE: &str = "complete";

/// Returns the arguments that a run must share with an earlier run to resume from its blocks.
pub(super) fn arguments(
    checkpoint: &Checkpoint,
    config: &Value,
    spec: &QuantSpec,
    options: &QuantizeOptions,
    calibration: &Calibration,
) -> Result<Map<String, Value>, ModelError> {
    // Only small weights are hashed: the norms.
    let mut model = Sha256::new();
    model.update(config.to_string());
    for name in checkpoint.names() {
        let tensor = checkpoint.tensor(name)?;
        model.update(format!("{name} {:?} {:?}", tensor.dtype(), tensor.shape()));
        if tensor.shape().len() < 2 {
            model.update(tensor.bytes());
        }
    }
    let mut text = Sha256::new();
    for sample in &calibration.samples {
        text.update((sample.len() as u64).to_le_bytes());
        sample
            .iter()
            .for_each(|token| text.update(token.to_le_bytes()));
    }
    let (order, damping) = match options.method {
        Method::Gptq { order, damping, .. } => (Some(format!("{order:?}")), Some(damping)),
        Method::Awq { .. } | Method::Round { .. } => (None, None),
    };
    let arguments = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": format!("{:x}", model.finalize()),
        "calibration text": format!("{:x}", text.finalize()),
        "spec": spec.to_string(),
        "sparsity": options.sparsity.to_string(),
        "exclude": options.exclude,
        "head": options.head.map(|spec| spec.to_string()),
        "awq": options.method.awq(),
        "overrides": options.overrides.iter().map(|(pattern, change)| format!("{pattern}={change}")).collect::<Vec<_>>(),
        "order": order,
        "damping": damping,
        "route all": calibration.route_all && order.is_some(),
        "dtype": calibration.dtype.map(|dtype: FloatDType| format!("{dtype:?}")),
    });
    Ok(arguments.as_object().cloned().unwrap_or_default())
}

/// A folder `TARGET.partial` with the arguments of a run and a folder for each completed block.
#[derive(Clone)]
pub(crate) struct Partial {
    dir: PathBuf,
    arguments: Map<String, Value>,
}

/// The result of a run that has written its target.
#[derive(Serialize, Deserialize)]
struct Complete {
    format: FileFormat,
    report: QuantizeReport,
}

impl Partial {
    /// Names the folder of a run with these arguments. Nothing is read or created.
    pub(crate) fn new(target: &Path, arguments: Map<String, Value>) -> Self {
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(".partial");
        Self {
            dir: target.with_file_name(name),
            arguments,
        }
    }

    /// Returns the report of an earlier run with the same arguments and format that was killed
    /// after its target was complete, except for its name, and before this folder was removed.
    pub(super) fn report(&self, format: FileFormat) -> Result<Option<QuantizeReport>, ModelError> {
        let path = self.dir.join(RUN);
        if !path.exists() {
            return Ok(None);
        }
        let found = read_json(&path)?;
        let Some(complete) = found
            .get(COMPLETE)
            .filter(|_| self.other_argument(&found).is_none())
        else {
            return Ok(None);
        };
        let complete =
            Complete::deserialize(complete).map_err(|source| ModelError::Json { path, source })?;
        Ok(Some(complete.report).filter(|_| complete.format == format))
    }

    /// Creates the folder, or checks the existing one and removes the files that were being written
    /// when its run was killed.
    ///
    /// # Errors
    /// [`ModelError::OtherRun`] if the folder belongs to a run with other arguments;
    /// [`ModelError::Io`].
    pub(super) fn open(&self) -> Result<(), ModelError> {
        let dir = &self.dir;
        fs::create_dir_all(dir).map_err(|source| ModelError::io("create", dir, source))?;
        let path = dir.join(RUN);
        if path.exists() {
            let found = read_json(&path)?;
            if let Some((argument, now)) = self.other_argument(&found) {
                let before = found.get(argument).unwrap_or(&Value::Null).to_string();
                return Err(ModelError::OtherRun {
                    dir: dir.clone(),
                    argument: argument.clone(),
                    before,
                    now: now.to_string(),
                });
            }
        } else {
            self.write(self.arguments.clone())?;
        }
        // Unfinished blocks, and the unfinished target.
        self.remove_folders(|name| name.starts_with('.'))
    }

    /// Removes the subfolders whose names satisfy `is_among`.
    fn remove_folders(&self, is_among: impl Fn(&str) -> bool) -> Result<(), ModelError> {
        let entries =
            fs::read_dir(&self.dir).map_err(|source| ModelError::io("list", &self.dir, source))?;
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.is_dir()
                && path
                    .file_name()
                    .is_some_and(|name| is_among(&name.to_string_lossy()))
            {
                fs::remove_dir_all(&path)
                    .map_err(|source| ModelError::io("remove", &path, source))?;
            }
        }
        Ok(())
    }

    /// Returns the first argument for which a run's file has another value.
    fn other_argument(&self, found: &Value) -> Option<(&String, &Value)> {
        self.arguments
            .iter()
            .find(|(argument, now)| found.get(argument).unwrap_or(&Value::Null) != *now)
    }

    /// Writes the run's file, and renames it when it is complete: a run that is killed in between
    /// leaves no file, or the previous one.
    fn write(&self, fields: Map<String, Value>) -> Result<(), ModelError> {
        let temporary = self.dir.join(".run.json");
        let text = format!("{:#}\n", Value::Object(fields));
        fs::write(&temporary, text)
            .map_err(|source| ModelError::io("write", &temporary, source))?;
        fs::rename(&temporary, self.dir.join(RUN))
            .map_err(|source| ModelError::io("rename", &temporary, source))
    }

    /// Stores the report of a target that is complete except for its name.
    pub(crate) fn keep_report(
        &self,
        format: FileFormat,
        report: &QuantizeReport,
    ) -> Result<(), ModelError> {
        let complete = serde_json::to_value(Complete {
            format,
            report: report.clone(),
        });
        let mut fields = self.arguments.clone();
        // Numbers and strings, which are always JSON.
        fields.insert(COMPLETE.into(), complete.unwrap_or_default());
        self.write(fields)
    }

    fn block_dir(&self, block: usize) -> PathBuf {
        self.dir.join(format!("block-{block:05}"))
    }

    /// Returns the weights and losses of a block, if it is complete.
    pub(super) fn block(
        &self,
        block: usize,
    ) -> Result<Option<(Checkpoint, Vec<LayerLoss>)>, ModelError> {
        let dir = self.block_dir(block);
        if !dir.exists() {
            return Ok(None);
        }
        let path = dir.join(LOSSES);
        let losses = serde_json::from_value(read_json(&path)?)
            .map_err(|source| ModelError::Json { path, source })?;
        Ok(Some((Checkpoint::open(&dir)?, losses)))
    }

    /// Creates a writer of a block. The block is complete when the writer finishes.
    pub(super) fn writer(
        &self,
        block: usize,
        losses: &[LayerLoss],
    ) -> Result<CheckpointWriter, ModelError> {
        let mut writer = CheckpointWriter::create(self.block_dir(block))?;
        // Numbers and strings, which are always JSON.
        let text = serde_json::to_string_pretty(losses).unwrap_or_default();
        writer.write_file(LOSSES, text.as_bytes())?;
        Ok(writer)
    }

    /// Creates a writer of the target.
    pub(super) fn target_writer(&self, target: &Path) -> Result<CheckpointWriter, ModelError> {
        Ok(CheckpointWriter::create_in(&self.dir, target)?)
    }

    /// Creates a reader of the completed blocks.
    pub(super) fn reader(&self) -> PartialReader<'_> {
        PartialReader {
            partial: self,
            open: None,
        }
    }

    /// Removes the folder after the target is complete. The blocks are removed before the run's
    /// file, so that a run that is killed in between is known to be complete.
    pub(super) fn remove(&self) -> Result<(), ModelError> {
        self.remove_folders(|_| true)?;
        fs::remove_dir_all(&self.dir).map_err(|source| ModelError::io("remove", &self.dir, source))
    }
}

/// A reader of the completed blocks. The last block stays open, since the tensors of a block are
/// read one after the other.
pub(super) struct PartialReader<'a> {
    partial: &'a Partial,
    open: Option<(usize, Checkpoint, Vec<LayerLoss>)>,
}

impl PartialReader<'_> {
    /// Returns the weights and losses of a block.
    fn block(&mut self, block: usize) -> Result<(&Checkpoint, &[LayerLoss]), ModelError> {
        let open = match self.open.take() {
            Some(open) if open.0 == block => open,
            _ => {
                let missing = || {
                    ModelError::io(
                        "open",
                        &self.partial.block_dir(block),
                        std::io::ErrorKind::NotFound.into(),
                    )
                };
                let (checkpoint, losses) = self.partial.block(block)?.ok_or_else(missing)?;
                (block, checkpoint, losses)
            }
        };
        let (_, checkpoint, losses) = self.open.insert(open);
        Ok((checkpoint, losses))
    }

    /// Returns the weight of a layer, and its loss.
    pub(super) fn layer(
        &mut self,
        layer: &str,
        spec: &QuantSpec,
    ) -> Result<(PlainWeight, Option<LayerLoss>), ModelError> {
        let (checkpoint, losses) = self.block(block_of(layer).unwrap_or(0))?;
        let weight = compressed_tensors::to_plain(checkpoint, layer, spec)?.detect_two_four();
        Ok((
            weight,
            losses.iter().find(|loss| loss.layer == layer).cloned(),
        ))
    }

    /// Returns the bytes of a tensor that replaces the source's, if the block has it.
    pub(super) fn tensor(&mut self, name: &str) -> Result<Option<Vec<u8>>, ModelError> {
        let Some(block) = block_of(name) else {
            return Ok(None);
        };
        let (checkpoint, _) = self.block(block)?;
        Ok(if checkpoint.contains(name) {
            Some(checkpoint.tensor(name)?.bytes().to_vec())
        } else {
            None
        })
    }
}

/// Returns the index of the block of a layer or tensor.
pub(super) fn block_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?
        .split('.')
        .next()?
        .parse()
        .ok()
}
