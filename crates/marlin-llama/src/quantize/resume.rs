//! The work of a run that is not complete: blocks that are quantised, beside the target.

use std::fs;
use std::path::{Path, PathBuf};

use marlin_format::checkpoint::{Checkpoint, CheckpointWriter, compressed_tensors};
use marlin_format::{PlainWeight, QuantSpec};
use marlin_quant::LayerLoss;
use serde_json::{Map, Value};

use crate::LlamaError;
use crate::config::read_json;

const ARGUMENTS: &str = "run.json";
const LOSSES: &str = "losses.json";

/// A folder `TARGET.partial` with the arguments of a run and a folder for each block that is done.
#[derive(Clone)]
pub(super) struct Partial {
    dir: PathBuf,
}

impl Partial {
    /// The folder of a run with these arguments, which is created where there is none.
    ///
    /// # Errors
    /// [`LlamaError::OtherRun`] where it is of a run with other arguments; [`LlamaError::Io`].
    pub(super) fn open(target: &Path, arguments: &Map<String, Value>) -> Result<Self, LlamaError> {
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(".partial");
        let dir = target.with_file_name(name);
        fs::create_dir_all(&dir).map_err(|source| LlamaError::io("create", &dir, source))?;
        let path = dir.join(ARGUMENTS);
        if path.exists() {
            let found = read_json(&path)?;
            for (argument, now) in arguments {
                let before = found.get(argument).unwrap_or(&Value::Null);
                if before != now {
                    return Err(LlamaError::OtherRun { dir, argument: argument.clone(), before: before.to_string(), now: now.to_string() });
                }
            }
        } else {
            // Renamed when it is whole: a run that is killed now leaves none.
            let temporary = dir.join(".run.json");
            let text = format!("{:#}\n", Value::Object(arguments.clone()));
            fs::write(&temporary, text).map_err(|source| LlamaError::io("write", &temporary, source))?;
            fs::rename(&temporary, &path).map_err(|source| LlamaError::io("rename", &temporary, source))?;
        }
        // What was being written when a run was killed: blocks, and the target.
        let entries = fs::read_dir(&dir).map_err(|source| LlamaError::io("list", &dir, source))?;
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.is_dir() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.')) {
                fs::remove_dir_all(&path).map_err(|source| LlamaError::io("remove", &path, source))?;
            }
        }
        Ok(Self { dir })
    }

    fn block_dir(&self, block: usize) -> PathBuf {
        self.dir.join(format!("block-{block:05}"))
    }

    /// The weights and losses of a block, where it is done.
    pub(super) fn block(&self, block: usize) -> Result<Option<(Checkpoint, Vec<LayerLoss>)>, LlamaError> {
        let dir = self.block_dir(block);
        if !dir.exists() {
            return Ok(None);
        }
        let path = dir.join(LOSSES);
        let losses = serde_json::from_value(read_json(&path)?).map_err(|source| LlamaError::Json { path, source })?;
        Ok(Some((Checkpoint::open(&dir)?, losses)))
    }

    /// A writer of a block: the block is done when the writer is.
    pub(super) fn writer(&self, block: usize, losses: &[LayerLoss]) -> Result<CheckpointWriter, LlamaError> {
        let mut writer = CheckpointWriter::create(self.block_dir(block))?;
        // Numbers and strings, which are always JSON.
        let text = serde_json::to_string_pretty(losses).unwrap_or_default();
        writer.write_file(LOSSES, text.as_bytes())?;
        Ok(writer)
    }

    /// A writer of the target.
    pub(super) fn target_writer(&self, target: &Path) -> Result<CheckpointWriter, LlamaError> {
        Ok(CheckpointWriter::create_in(&self.dir, target)?)
    }

    /// A reader of its blocks.
    pub(super) fn reader(&self) -> PartialReader<'_> {
        PartialReader { partial: self, open: None }
    }

    /// Removes the folder, when the target is complete.
    pub(super) fn remove(self) -> Result<(), LlamaError> {
        fs::remove_dir_all(&self.dir).map_err(|source| LlamaError::io("remove", &self.dir, source))
    }
}

/// A reader of the blocks that are done. The last one stays open: the tensors of a block come one after the other.
pub(super) struct PartialReader<'a> {
    partial: &'a Partial,
    open: Option<(usize, Checkpoint, Vec<LayerLoss>)>,
}

impl PartialReader<'_> {
    /// The weights and losses of a block.
    fn block(&mut self, block: usize) -> Result<(&Checkpoint, &[LayerLoss]), LlamaError> {
        let open = match self.open.take() {
            Some(open) if open.0 == block => open,
            _ => {
                let missing = || LlamaError::io("open", &self.partial.block_dir(block), std::io::ErrorKind::NotFound.into());
                let (checkpoint, losses) = self.partial.block(block)?.ok_or_else(missing)?;
                (block, checkpoint, losses)
            }
        };
        let (_, checkpoint, losses) = self.open.insert(open);
        Ok((checkpoint, losses))
    }

    /// A layer, and its loss.
    pub(super) fn layer(&mut self, layer: &str, spec: &QuantSpec) -> Result<(PlainWeight, Option<LayerLoss>), LlamaError> {
        let (checkpoint, losses) = self.block(block_of(layer).unwrap_or(0))?;
        let weight = compressed_tensors::to_plain(checkpoint, layer, spec)?.as_found();
        Ok((weight, losses.iter().find(|loss| loss.layer == layer).cloned()))
    }

    /// The bytes of a tensor that a block has in the place of the source's.
    pub(super) fn tensor(&mut self, name: &str) -> Result<Option<Vec<u8>>, LlamaError> {
        let Some(block) = block_of(name) else { return Ok(None) };
        let (checkpoint, _) = self.block(block)?;
        Ok(if checkpoint.contains(name) { Some(checkpoint.tensor(name)?.bytes().to_vec()) } else { None })
    }
}

/// The block that a layer or tensor is in.
fn block_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}
