//! The folder of the model, which is replaced after each evaluation that is the best so far.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::tensor::FloatDType;
use marlin_lm::{Model, ModelConfig, save_float};
use serde_json::json;

use super::prune::Pruning;
use crate::corpus::{CONTEXT, write_json};
use crate::error::Error;

/// The file that records the training. A folder that has this file may be replaced.
const TRAINING: &str = "training.json";
/// The files of the corpus folder that are copied to the model's folder.
const TOKENIZER_FILES: [&str; 2] = ["tokenizer.json", "tokenizer_config.json"];

/// The contents of `training.json`.
#[derive(Debug, Default)]
pub struct Progress {
    /// Name of the device.
    pub device: String,
    /// Windows per step.
    pub batch: usize,
    /// Tokens per window.
    pub seq: usize,
    /// Seed of the weights and of the order of the text.
    pub seed: u64,
    /// Peak learning rate.
    pub lr: f64,
    /// Mean loss over the last reported steps, in nats per token.
    pub train_loss: f32,
    /// Steps taken.
    pub steps: usize,
    /// Time since the first step.
    pub elapsed: Duration,
    /// Perplexity on the held-out text.
    pub perplexity: f64,
    /// The pruning of a 2:4 model, and the held-out perplexity of the pruned model before the first
    /// step.
    pub pruned: Option<(Pruning, f64)>,
}

impl Progress {
    fn to_json(&self) -> serde_json::Value {
        let mut fields = json!({
            "steps": self.steps,
            "tokens": self.steps * self.batch * self.seq,
            "batch": self.batch,
            "seq": self.seq,
            "learning_rate": self.lr,
            "seed": self.seed,
            "seconds": self.elapsed.as_secs_f64().round(),
            "device": self.device,
            "train_loss": self.train_loss,
            "heldout_perplexity": self.perplexity,
        });
        if let Some((pruning, perplexity)) = self.pruned {
            fields["sparsity"] = "2:4".into();
            fields["projections_pruned_by_magnitude"] = pruning.by_magnitude.into();
            fields["heldout_perplexity_when_pruned"] = perplexity.into();
        }
        fields
    }
}

/// The folder of the model, and the contents of its files other than the weights.
#[derive(Debug)]
pub struct Output {
    dir: PathBuf,
    tokenizer: Vec<(&'static str, Vec<u8>)>,
}

impl Output {
    /// Reads the tokenizer of the corpus folder `data`, and checks that `dir` may be replaced. A
    /// `dir` with contents other than a trained model is an error.
    pub fn new(dir: &Path, data: &Path) -> Result<Self, Error> {
        let in_use = dir.is_dir() && fs::read_dir(dir).map_err(Error::io(dir))?.next().is_some();
        if in_use && !dir.join(TRAINING).is_file() {
            let message = format!(
                "--out {} is not empty and has no {TRAINING}, so it is no trained model to replace; name a new folder",
                dir.display()
            );
            return Err(Error::Option(message));
        }
        let read = |name: &'static str| {
            let path = data.join(name);
            Ok((name, fs::read(&path).map_err(Error::io(&path))?))
        };
        Ok(Self {
            dir: dir.to_owned(),
            tokenizer: TOKENIZER_FILES
                .into_iter()
                .map(read)
                .collect::<Result<_, Error>>()?,
        })
    }

    /// Checks that the corpus was encoded with the tokenizer of the model in `folder`.
    pub fn same_tokenizer(&self, folder: &Path) -> Result<(), Error> {
        let (name, content) = &self.tokenizer[0];
        let path = folder.join(name);
        if fs::read(&path).map_err(Error::io(&path))? == *content {
            return Ok(());
        }
        let message = format!(
            "--from {}: its {name} is not that of --data, so the tokens there mean other text; write them with `corpus --tokenizer {}`",
            folder.display(),
            path.display()
        );
        Err(Error::Option(message))
    }

    /// Writes the model in f16, and replaces the contents of the folder.
    pub fn save(
        &self,
        model: &Model,
        config: &ModelConfig,
        progress: &Progress,
    ) -> Result<(), Error> {
        // The model is first written beside the folder, so that a run that is killed while saving
        // leaves the earlier model intact.
        let mut name = self.dir.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let new = self.dir.with_file_name(name);
        remove(&new)?;
        save_float(model, config, &new, FloatDType::F16)?;
        for (name, content) in &self.tokenizer {
            let path = new.join(name);
            fs::write(&path, content).map_err(Error::io(&path))?;
        }
        let generation = json!({
            "bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids.first(), "max_length": CONTEXT,
            "do_sample": true, "temperature": 0.7, "top_k": 40, "top_p": 0.9,
        });
        write_json(&new.join("generation_config.json"), &generation)?;
        write_json(&new.join(TRAINING), &progress.to_json())?;
        remove(&self.dir)?;
        fs::rename(&new, &self.dir).map_err(Error::io(&self.dir))
    }
}

fn remove(dir: &Path) -> Result<(), Error> {
    if dir.exists() {
        fs::remove_dir_all(dir).map_err(Error::io(dir))
    } else {
        Ok(())
    }
}
