//! Times prompts with generated weights in Llama's shapes: from adding them together to the first
//! token of every prompt.

use crate::BenchError;
use crate::decode::{CHUNK, add_requests, failed, first_tokens, prefill_steps, step, value_name};
use crate::preset::Preset;
use crate::record;
use crate::weights::Weights;
use burn::tensor::{Device, FloatDType};
use clap::Args;
use marlin_lm::{Engine, Model};
use serde::Serialize;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

/// The number of timed rounds for a figure, after one that compiles and records.
const ROUNDS: usize = 5;
/// The number of steps that are timed before prompts are added.
const STEPS: usize = 32;

/// The arguments of the prompt bench: models, weights and prompts.
#[derive(Args)]
pub struct PromptArgs {
    /// The models whose shapes to use.
    #[arg(long, value_delimiter = ',', default_values_t = [Preset::Llama2Seven], value_enum)]
    models: Vec<Preset>,
    /// The formats of the layers' weights.
    #[arg(long, value_delimiter = ',', default_values_t = [Weights::W4a16], value_enum)]
    weights: Vec<Weights>,
    /// Prompts that are added together, and the tokens of each: `16x64`.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1x64,1x512,1x1024,1x4000,16x64,8x1024"
    )]
    prompts: Vec<Prompts>,
    /// Sequences that decode while the prompts are read: prints the longest and the median step
    /// instead of the time to the first token.
    #[arg(long)]
    running: Option<usize>,
    /// Write a record of the run to this file.
    #[arg(long)]
    record: Option<PathBuf>,
}

/// Prompts that are added together.
#[derive(Debug, Clone, Copy)]
struct Prompts {
    count: usize,
    tokens: usize,
}

impl FromStr for Prompts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text
            .split_once('x')
            .map(|(count, tokens)| (count.parse(), tokens.parse()));
        match parts {
            Some((Ok(count), Ok(tokens))) if count > 0 && tokens > 0 => Ok(Self { count, tokens }),
            _ => Err(format!(
                "`{text}` is no number of prompts and of tokens, such as 16x64"
            )),
        }
    }
}

/// The time to the first token for one number and length of prompts.
#[derive(Debug, Serialize)]
struct PromptFigure {
    /// Always "step": prompts run the kernels of a step.
    routine: &'static str,
    /// The digest of the sources of a step's kernels, as in a record of decode steps.
    digest: &'static str,
    model: String,
    weights: String,
    prompts: usize,
    tokens: usize,
    /// The median time from adding the prompts to the first token of the last prompt, in
    /// milliseconds, with everything compiled and recorded.
    ttft_ms: f64,
    /// The shortest time to the first token of the last prompt, in milliseconds.
    best_ms: f64,
    tokens_per_second: f64,
}

/// The times of decode steps before and during the prefill of prompts.
#[derive(Debug, Serialize)]
struct RunningRow {
    /// Always "step", as in a [`PromptFigure`].
    routine: &'static str,
    digest: &'static str,
    model: String,
    weights: String,
    /// The number of sequences that decode throughout.
    running: usize,
    prompts: usize,
    tokens: usize,
    /// The number of prompt tokens that a pass processes.
    chunk: usize,
    /// The median step before prompts are added, in milliseconds; `longest_step_ms` is the
    /// longest.
    step_ms: f64,
    longest_step_ms: f64,
    /// The median time of a step after the prompts are added, until every prompt has its first
    /// token, in milliseconds; `longest_joining_step_ms` is the longest time.
    joining_step_ms: f64,
    longest_joining_step_ms: f64,
}

/// Times the prompts in the arguments, prints a line for each, and writes the record.
pub fn run(args: &PromptArgs) -> Result<(), BenchError> {
    let device = Device::cuda(0);
    let name = burn_marlin::device::device_name(&device);
    println!("{name}: f16 activations and head");
    println!(
        "{:16} {:8} {:>7} {:>7}  {:>9} {:>9} {:>11}",
        "model", "weights", "prompts", "tokens", "TTFT ms", "best ms", "tokens/s"
    );
    let (mut rows, mut running_rows) = (Vec::new(), Vec::new());
    for &model in &args.models {
        for &weights in &args.weights {
            let config = model.config()?;
            let needed = args
                .prompts
                .iter()
                .map(|prompts| prompts.tokens + prefill_steps(prompts.count, prompts.tokens) + 1)
                .max();
            let max_len = needed.unwrap_or(1).min(config.max_position_embeddings);
            let built = Arc::new(
                Model::random(&config, max_len, FloatDType::F16, weights.format(), &device)
                    .map_err(failed)?,
            );
            for &prompts in &args.prompts {
                if let Some(running) = args.running {
                    let [
                        (step_ms, longest_step_ms),
                        (joining_step_ms, longest_joining_step_ms),
                    ] = interfere(&built, running, prompts)?;
                    running_rows.push(RunningRow {
                        routine: "step",
                        digest: record::STEP_DIGEST,
                        model: value_name(model),
                        weights: value_name(weights),
                        running,
                        prompts: prompts.count,
                        tokens: prompts.tokens,
                        chunk: CHUNK,
                        step_ms,
                        longest_step_ms,
                        joining_step_ms,
                        longest_joining_step_ms,
                    });
                    if let Some(path) = &args.record {
                        record::write(path, &name, &running_rows)?;
                    }
                    continue;
                }
                let mut times = time(&built, prompts)?;
                times.sort_by(f64::total_cmp);
                let (median, best) = (times[times.len() / 2], times[0]);
                let row = PromptFigure {
                    routine: "step",
                    digest: record::STEP_DIGEST,
                    model: value_name(model),
                    weights: value_name(weights),
                    prompts: prompts.count,
                    tokens: prompts.tokens,
                    ttft_ms: median * 1e3,
                    best_ms: best * 1e3,
                    tokens_per_second: (prompts.count * prompts.tokens) as f64 / median,
                };
                println!(
                    "{:16} {:8} {:>7} {:>7}  {:>9.2} {:>9.2} {:>11.0}",
                    row.model,
                    row.weights,
                    row.prompts,
                    row.tokens,
                    row.ttft_ms,
                    row.best_ms,
                    row.tokens_per_second
                );
                rows.push(row);
                if let Some(path) = &args.record {
                    record::write(path, &name, &rows)?;
                }
            }
            drop(built);
            device.memory_cleanup();
        }
    }
    Ok(())
}

/// Returns the time of each round to the first token of all prompts, in seconds.
fn time(model: &Arc<Model>, Prompts { count, tokens }: Prompts) -> Result<Vec<f64>, BenchError> {
    let mut engine = Engine::new(model.clone(), count).map_err(failed)?;
    let mut times = Vec::with_capacity(ROUNDS + 1);
    for round in 0..=ROUNDS {
        times.push(first_tokens(
            &mut engine,
            model.config().vocab_size,
            [count, tokens, 1],
            round,
        )?);
        for slot in 0..count {
            engine.abort(slot);
        }
    }
    Ok(times.split_off(1))
}

/// Prints and returns the median and the longest step of `running` sequences in milliseconds, first
/// without and then with the prefill of prompts in chunks of [`CHUNK`] tokens.
fn interfere(
    model: &Arc<Model>,
    running: usize,
    prompts: Prompts,
) -> Result<[(f64, f64); 2], BenchError> {
    let vocab = model.config().vocab_size;
    let steps = prefill_steps(prompts.count, prompts.tokens) + STEPS;
    let all = running + prompts.count;
    let mut engine = Engine::new(model.clone(), all).map_err(failed)?;
    engine.set_prefill_chunk(CHUNK);
    let mut found = [(0.0, 0.0); 2];
    // The first round compiles and records.
    for round in 0..2 {
        first_tokens(&mut engine, vocab, [running, STEPS, 2 * steps], round)?;
        let mut alone = Vec::with_capacity(STEPS);
        for _ in 0..STEPS {
            let start = Instant::now();
            step(&mut engine, running)?;
            alone.push(start.elapsed().as_secs_f64());
        }
        add_requests(
            &mut engine,
            vocab,
            [prompts.count, prompts.tokens, steps],
            round,
        )?;
        let (mut reading, mut decoded) = (Vec::with_capacity(steps), 0);
        while decoded < all {
            let start = Instant::now();
            decoded = step(&mut engine, all)?;
            reading.push(start.elapsed().as_secs_f64());
        }
        for slot in 0..all {
            engine.abort(slot);
        }
        found = [alone, reading].map(|mut times| {
            times.sort_by(f64::total_cmp);
            (1e3 * times[times.len() / 2], 1e3 * times[times.len() - 1])
        });
    }
    let [alone, reading] = found;
    println!(
        "{running} sequences decode: a step {:.2} ms, the longest {:.2}; while {}x{} are read {:.2} ms, the longest {:.2}",
        alone.0, alone.1, prompts.count, prompts.tokens, reading.0, reading.1
    );
    Ok(found)
}
