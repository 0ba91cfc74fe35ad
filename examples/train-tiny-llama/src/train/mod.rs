//! `train`: trains the model on a folder that `corpus` wrote, and writes the model of the best
//! evaluation as a Hugging Face folder.

mod clip;
mod output;
mod prune;
mod schedule;
mod size;
mod tokens;
mod trainer;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(feature = "cuda")]
use burn::tensor::DeviceType;
use burn::tensor::{Device, FloatDType};
use clap::ValueEnum;
use marlin_lm::{LanguageModel, ModelConfig, OpenOptions};

use crate::corpus::{self, CONTEXT};
use crate::error::Error;
use output::{Output, Progress};
use schedule::Schedule;
use size::Size;
use trainer::Trainer;

/// The number of steps from one line of output to the next; each line waits for the device.
const REPORT_STEPS: usize = 50;

/// Options of `train`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Folder that `corpus` wrote
    #[arg(long)]
    data: PathBuf,
    /// Folder to write the model to: new, empty, or from an earlier training, whose model is
    /// replaced
    #[arg(long)]
    out: PathBuf,
    /// The device to train on
    #[arg(long, value_enum)]
    device: DeviceKind,
    /// The size of a new model
    #[arg(long, value_enum, default_value = "5m", conflicts_with = "from")]
    size: Size,
    /// Maximum number of steps
    #[arg(long, default_value_t = 8000)]
    steps: usize,
    /// Maximum time in seconds, including evaluations; the learning rate falls accordingly
    #[arg(long)]
    max_seconds: Option<u64>,
    /// Windows per step
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Tokens per window
    #[arg(long, default_value_t = CONTEXT)]
    seq: usize,
    /// Peak learning rate
    #[arg(long, default_value_t = 3e-3)]
    lr: f64,
    /// Steps over which the learning rate rises
    #[arg(long, default_value_t = 200)]
    warmup: usize,
    /// Steps from one evaluation on the held-out text to the next
    #[arg(long, default_value_t = 500)]
    eval_steps: usize,
    /// Seed of the weights and of the order of the text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Fine-tune the model of --from with a fixed 2:4 mask; projections that are not 2:4 are first
    /// pruned by magnitude
    #[arg(long, requires = "from")]
    sparse24: bool,
    /// Folder of the model to fine-tune: float, or quantised, whose dequantised values are used
    #[arg(long, requires = "sparse24")]
    from: Option<PathBuf>,
}

/// A device to train on.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum DeviceKind {
    /// The first NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda,
    /// The processor.
    #[cfg(feature = "flex")]
    Flex,
}

impl DeviceKind {
    /// Opens the device, and returns it with its name.
    fn open(self) -> Result<(Device, String), Error> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => {
                // Using a device that is not present panics in the loader of the driver.
                let found = Device::enumerate(DeviceType::Cuda).into_iter().next();
                let device = found.ok_or_else(|| {
                    Error::Option("--device cuda: no NVIDIA GPU or driver was found".into())
                })?;
                let name = device
                    .identity()
                    .map_or_else(|| "CUDA device 0".to_owned(), |identity| identity.name);
                Ok((device, name))
            }
            #[cfg(feature = "flex")]
            Self::Flex => Ok((Device::flex(), "processor (Flex)".to_owned())),
        }
    }
}

/// Runs `train`.
pub fn run(options: &Options) -> Result<(), Error> {
    let config = match &options.from {
        Some(folder) => ModelConfig::read(&folder.join("config.json"))?,
        None => options.size.config(),
    };
    train(options, config)
}

/// Creates a trainer for a model with random weights, or for the model of `--from` with a fixed 2:4
/// mask.
fn trainer(
    options: &Options,
    config: &ModelConfig,
    train_tokens: Vec<i32>,
    device: &Device,
) -> Result<Trainer, Error> {
    let Some(folder) = &options.from else {
        return Ok(Trainer::new(config, train_tokens, options, device));
    };
    let open = OpenOptions {
        dtype: Some(FloatDType::F32),
        max_len: Some(config.max_position_embeddings),
        with_tokenizer: false,
        ..OpenOptions::default()
    };
    let llama = LanguageModel::open(folder, device, &open)?;
    let mut model = Arc::unwrap_or_clone(llama.model);
    model.dequantize();
    Trainer::sparse(model, train_tokens, options, device)
}

fn train(options: &Options, config: ModelConfig) -> Result<(), Error> {
    check(options)?;
    let output = Output::new(&options.out, &options.data)?;
    if let Some(folder) = &options.from {
        output.same_tokenizer(folder)?;
    }
    let train_tokens = tokens::read(
        &options.data.join(corpus::TRAIN_TOKENS),
        config.vocab_size,
        options.seq + 1,
    )?;
    let held_out = tokens::read(
        &options.data.join(corpus::HELD_OUT_TOKENS),
        config.vocab_size,
        2,
    )?;
    let (device, device_name) = options.device.open()?;
    let batch_tokens = options.batch * options.seq;
    println!(
        "{} training tokens, {batch_tokens} a step, on {device_name}",
        train_tokens.len()
    );

    let schedule = Schedule {
        peak: options.lr,
        warmup: options.warmup,
        steps: options.steps,
        limit: options.max_seconds.map(Duration::from_secs),
    };
    let mut trainer = trainer(options, &config, train_tokens, &device)?;
    println!("{} parameters", trainer.num_params());

    let start = Instant::now();
    let mut progress = Progress {
        device: device_name,
        batch: options.batch,
        seq: options.seq,
        seed: options.seed,
        lr: options.lr,
        ..Progress::default()
    };
    if let Some(pruning) = trainer.pruning() {
        let perplexity = trainer.perplexity(&held_out)?;
        println!("{pruning}; held-out perplexity {perplexity:.3}");
        progress.pruned = Some((pruning, perplexity));
    }
    let mut best = f64::INFINITY;
    let mut last_report = (0, start.elapsed());
    for step in 1..=options.steps {
        trainer.step(schedule.learning_rate(step - 1, start.elapsed()))?;
        let done = schedule.progress(step, start.elapsed());
        let last = done >= 1.0;
        if step % REPORT_STEPS == 0 || last {
            progress.train_loss = trainer.mean_loss()?;
            if !progress.train_loss.is_finite() {
                return Err(Error::Diverged {
                    loss: progress.train_loss,
                    step,
                    lr: options.lr,
                });
            }
            let now = start.elapsed();
            let rate = ((step - last_report.0) * batch_tokens) as f64
                / (now - last_report.1).as_secs_f64();
            let left = now.as_secs_f64() * (1.0 - done) / done.max(1e-9);
            println!(
                "step {step:>6}  loss {:.4}  {:>9.0} tokens/s  {:.0} s, {left:.0} s left",
                progress.train_loss,
                rate,
                now.as_secs_f64()
            );
            last_report = (step, now);
        }
        if step % options.eval_steps == 0 || last {
            let perplexity = trainer.perplexity(&held_out)?;
            println!("step {step:>6}  held-out perplexity {perplexity:.3}");
            if perplexity < best {
                best = perplexity;
                (progress.steps, progress.elapsed, progress.perplexity) =
                    (step, start.elapsed(), perplexity);
                output.save(&trainer.model(), &config, &progress)?;
            }
            // The rate does not include evaluations.
            last_report = (step, start.elapsed());
        }
        if last {
            break;
        }
    }
    println!(
        "best held-out perplexity {best:.3}: {}",
        options.out.display()
    );
    Ok(())
}

fn check(options: &Options) -> Result<(), Error> {
    let positive = [
        ("steps", options.steps),
        ("batch", options.batch),
        ("eval-steps", options.eval_steps),
    ];
    if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
        return Err(Error::Option(format!("--{name} must be at least 1")));
    }
    if !(2..=CONTEXT).contains(&options.seq) {
        return Err(Error::Option(format!(
            "--seq {} is not between 2 and the model's context of {CONTEXT} tokens",
            options.seq
        )));
    }
    if !(options.lr.is_finite() && options.lr > 0.0) {
        return Err(Error::Option(format!(
            "--lr {} is not a positive number",
            options.lr
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
