//! Checks of a Hugging Face folder.

use super::report::{Check, Section};
use crate::output::{message, size};
use crate::progress::Progress;
use burn::tensor::Device;
use burn_marlin::device::device_name;
use marlin_format::checkpoint::{Checkpoint, CheckpointError};
use marlin_lm::{
    ChatTemplate, ModelConfig, ModelError, OpenOptions, TextError, Tokenizer, check_folder,
};
use std::path::Path;

/// Opens everything in a folder that commands open. Returns what it has and every fault.
pub fn check(dir: &Path, device: &Device) -> Section {
    let progress = Progress::of_bytes("read");
    let mut layers = 0;
    let faults = check_folder(dir, device, &OpenOptions::default(), |name, _, _| {
        progress.set_message(name);
        layers += 1;
    });
    progress.finish();
    let mut checks = found(dir, layers);
    if faults.is_empty() {
        let message = format!("every file and tensor; room on {}", device_name(device));
        checks.push(Check::ok("complete", message));
    }
    checks.extend(
        faults
            .iter()
            .map(|fault| Check::error("fault", message(fault), fix(fault, dir))),
    );
    Section {
        name: "folder",
        checks,
    }
}

/// Returns the parts of the folder that can be opened.
fn found(dir: &Path, layers: usize) -> Vec<Check> {
    let mut checks = vec![Check::ok("path", dir.display().to_string())];
    if let Ok(config) = ModelConfig::read(&dir.join("config.json")) {
        let (architecture, blocks) = (config.architecture, config.num_hidden_layers);
        let message = format!(
            "{architecture}, {blocks} blocks, {} positions",
            config.positions()
        );
        checks.push(Check::ok("config", message));
    }
    if let Ok(tokenizer) = Tokenizer::open(&dir.join("tokenizer.json")) {
        let message = format!("{} tokens", tokenizer.vocab_size());
        checks.push(Check::ok("tokenizer", message));
    }
    match ChatTemplate::open(dir) {
        Ok(Some(template)) => {
            let name = template.path().file_name().unwrap_or_default();
            checks.push(Check::ok("chat template", name.display().to_string()));
        }
        Ok(None) => checks.push(Check::ok(
            "chat template",
            "none, as of a base model; chat then has plain turns",
        )),
        // One of the faults.
        Err(_) => {}
    }
    if let Ok(checkpoint) = Checkpoint::open(dir) {
        let (tensors, bytes) = (checkpoint.names().count(), size(checkpoint.size_bytes()));
        let message = format!("{tensors} tensors in {bytes}, {layers} quantised layers");
        checks.push(Check::ok("weights", message));
    }
    checks
}

/// Returns what to do about a fault: a command, with REPO for the model's name on the hub, if
/// files are missing or damaged.
fn fix(fault: &ModelError, dir: &Path) -> String {
    let download = |path: Option<&Path>| {
        let name = path.and_then(|path| path.strip_prefix(dir).ok());
        let name = name.map_or_else(String::new, |name| format!(" '{}'", name.display()));
        format!(
            "hf download REPO{name} --local-dir '{}' --force-download",
            dir.display()
        )
    };
    match fault {
        ModelError::Checkpoint(error) => match error {
            CheckpointError::LfsPointer { .. } => format!("git -C '{}' lfs pull", dir.display()),
            CheckpointError::MissingShard { path, .. }
            | CheckpointError::NotInShard { path, .. }
            | CheckpointError::Header { path, .. }
            | CheckpointError::Index { path, .. }
            | CheckpointError::Io { path, .. } => download(Some(path)),
            CheckpointError::LayerTooLarge { .. } => "a machine with more memory".into(),
            CheckpointError::DuplicateTensor { .. } => {
                "remove the file that is not of this model".into()
            }
            _ => download(None),
        },
        ModelError::Text(
            TextError::Io { path, .. }
            | TextError::Json { path, .. }
            | TextError::Tokenizer { path, .. }
            | TextError::ChatTemplate { path, .. }
            | TextError::ChatTemplateField { path, .. },
        ) => download(Some(path)),
        ModelError::Io { path, .. } | ModelError::Json { path, .. } => download(Some(path)),
        ModelError::GenerationConfig { path, .. } => {
            format!("correct or remove '{}'", path.display())
        }
        ModelError::Config { .. } | ModelError::QuantizationConfig { .. } => {
            "a model of another kind, or this one in another format: see `Checkpoints` in the book"
                .into()
        }
        ModelError::Adapter { .. } => "the folder of the model that it was trained on".into(),
        ModelError::TooLarge { .. } | ModelError::MaxLen { .. } => {
            "a smaller --max-len, or a device with more memory".into()
        }
        ModelError::QuantizedEmbedding { .. } => "quantise the model without its embedding".into(),
        ModelError::SurplusTensors { .. } => {
            "a config.json of the same model as the weights".into()
        }
        _ => download(None),
    }
}
