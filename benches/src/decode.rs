//! Times decoding with generated weights in Llama's shapes: whole steps, and each part of a step.

use crate::BenchError;
use crate::kernels::{Rates, rates};
use crate::preset::Preset;
use crate::record;
use crate::weights::Weights;
use burn::tensor::{Device, FloatDType};
use clap::builder::TypedValueParser;
use clap::{Args, ValueEnum};
use marlin_format::{GroupSize, QuantSpec, WeightValue};
use marlin_lm::model::{Block, Experts};
use marlin_lm::{CacheFormat, Engine, Model, ModelConfig, Projection, RequestParams};
use serde::Serialize;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// The arguments of the decode bench: models, weights and lengths.
#[derive(Args)]
pub struct DecodeArgs {
    /// The models whose shapes to use.
    #[arg(long, value_delimiter = ',', default_values_t = [Preset::Llama2Seven, Preset::Llama3Eight, Preset::Llama2Seventy, Preset::Shipped], value_enum)]
    models: Vec<Preset>,
    /// The formats of the layers' weights.
    #[arg(long, value_delimiter = ',', default_values_t = [Weights::W4a16, Weights::F16], value_enum)]
    weights: Vec<Weights>,
    /// Numbers of requests that decode together.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128])]
    batch: Vec<usize>,
    /// Tokens per prompt.
    #[arg(long, default_value_t = 64)]
    prompt: usize,
    /// Tokens that each sequence decodes after its prompt.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512])]
    new_tokens: Vec<usize>,
    /// Print the time of each part of a step.
    #[arg(long)]
    parts: bool,
    /// Positions of the KV cache; by default as many as each run needs.
    #[arg(long)]
    max_len: Option<usize>,
    /// Positions of a page of the KV cache; 0 for a cache without pages.
    #[arg(long, value_delimiter = ',', default_values_t = [0])]
    page_size: Vec<usize>,
    /// Keep the KV cache in e4m3; needs --page-size.
    #[arg(long)]
    fp8_cache: bool,
    /// Round the output head to 4 or 8 bits, groups of 128; without it the head is in f16.
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(i64).try_map(WeightValue::try_from))]
    head: Option<WeightValue>,
    /// Record passes without programmatic dependent launch, so that kernels do not overlap, for
    /// comparison.
    #[arg(long)]
    ordinary_edges: bool,
    /// Write a record of the run to this file.
    #[arg(long)]
    record: Option<PathBuf>,
}

/// The figures of one run.
#[derive(Debug, Serialize)]
pub struct StepFigure {
    /// Always "step", for a whole step.
    routine: &'static str,
    /// The digest of the sources of a step's kernels: [`STEP_DIGEST`](record::STEP_DIGEST).
    digest: &'static str,
    model: String,
    weights: String,
    batch: usize,
    prompt_tokens: usize,
    new_tokens: usize,
    /// The number of positions of a page of the KV cache, if it has pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    page_size: Option<usize>,
    /// The format of the KV cache, if it is not that of the activations.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache: Option<&'static str>,
    /// The values of the output head, if they are not f16.
    #[serde(skip_serializing_if = "Option::is_none")]
    head: Option<String>,
    /// The time from the prompts to the first token of the last sequence, in milliseconds, with
    /// everything compiled. The other sequences decode in the meantime.
    ttft_ms: f64,
    /// Prompt tokens per second.
    prefill_tokens_per_second: f64,
    /// The mean time of a step after the first, in milliseconds.
    time_per_output_token_ms: f64,
    tokens_per_second: f64,
    /// Bytes of weights that a step reads.
    weight_bytes: usize,
    /// The bytes of weights read per second, as a fraction of the card's read rate; `None` if that
    /// rate was not measured.
    read_fraction: Option<f64>,
}

/// Times the models in the arguments, prints a line for each run, and writes the record.
pub fn run(args: &DecodeArgs) -> Result<(), BenchError> {
    let device = Device::cuda(0);
    marlin_kernels::pdl::record_ordinary_edges(args.ordinary_edges);
    let name = burn_marlin::device::device_name(&device);
    println!(
        "{name}: {} prompt tokens, f16 activations, {} head",
        args.prompt,
        args.head
            .map_or_else(|| "f16".into(), |value| value.to_string())
    );
    println!(
        "{:16} {:8} {:>5} {:>5} {:>5}  {:>9} {:>11} {:>9} {:>10} {:>8} {:>6}",
        "model",
        "weights",
        "batch",
        "new",
        "page",
        "TTFT ms",
        "prefill t/s",
        "TPOT ms",
        "tokens/s",
        "GB/s",
        "read"
    );
    let mut rows = Vec::new();
    let cache_format = match args.fp8_cache {
        true => CacheFormat::E4m3,
        false => CacheFormat::Activations,
    };
    for &model in &args.models {
        for &weights in &args.weights {
            let format = weights.format();
            let config = model.config()?;
            let longest = args.new_tokens.iter().max().copied().unwrap_or(0);
            let prefill = args
                .batch
                .iter()
                .map(|&batch| prefill_steps(batch, args.prompt))
                .max()
                .unwrap_or(0);
            let max_len = args
                .max_len
                .unwrap_or(args.prompt + longest + prefill)
                .min(config.max_position_embeddings);
            let needed = float_bytes(&config) * if format.is_some() { 1 } else { 4 } / 4;
            if burn_marlin::device::free_memory(&device).is_some_and(|free| free < needed) {
                println!(
                    "{:16} {:8} does not fit the card: {:.0} GB",
                    value_name(model),
                    value_name(weights),
                    needed as f64 / 1e9
                );
                continue;
            }
            let mut built = Model::random(&config, max_len, FloatDType::F16, format, &device)
                .map_err(failed)?;
            if let Some(value) = args.head {
                built
                    .quantize_head(&QuantSpec::new(value, GroupSize::G128))
                    .map_err(failed)?;
            }
            let built = Arc::new(built);
            for &batch in &args.batch {
                let bytes = weight_bytes(&built, batch);
                let page_sizes = args.page_size.iter();
                for (&new_tokens, &page_size) in (args.new_tokens.iter())
                    .flat_map(|new_tokens| page_sizes.clone().map(move |size| (new_tokens, size)))
                {
                    let lengths = [batch, args.prompt, new_tokens];
                    let times = match page_size {
                        0 => time(&built, lengths)?,
                        _ => crate::paged::time(&built, lengths, page_size, cache_format)?,
                    };
                    let rates = rates(&name);
                    let row = report(model, weights, lengths, page_size, bytes, times, rates);
                    let is_fp8 = args.fp8_cache && page_size > 0;
                    rows.push(StepFigure {
                        cache: is_fp8.then_some("e4m3"),
                        head: args.head.map(|value| value.to_string()),
                        ..row
                    });
                    // The record is written after every run, because a run takes minutes.
                    if let Some(path) = &args.record {
                        record::write(path, &name, &rows)?;
                    }
                }
                if args.parts {
                    crate::parts::report(&built, batch, args.prompt)?;
                }
            }
            drop(built);
            device.memory_cleanup();
        }
    }
    Ok(())
}

/// Converts an error of a model to an error of the bench.
pub fn failed(error: impl Display) -> BenchError {
    BenchError::Model(error.to_string())
}

/// Returns the name of a value on the command line.
pub fn value_name(value: impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Returns the bytes of a model in f16.
fn float_bytes(config: &ModelConfig) -> usize {
    config.sizes(None, FloatDType::F16).bytes()
}

/// Returns the bytes of weights that a step of `rows` sequences reads: all except the embedding, of
/// which a step reads one row per sequence, and the experts that no sequence has, if each chooses
/// its experts at random.
fn weight_bytes(model: &Model, rows: usize) -> usize {
    let config = model.config();
    let norms = 2 * (2 * config.num_hidden_layers + 1) * config.hidden_size;
    let projections = model.projections().map(|(_, projection)| match projection {
        Projection::Dense(linear) => 2 * linear.weight.shape().num_elements(),
        Projection::Quant(linear) => linear.weight().size_bytes(),
    });
    let experts = model
        .layers
        .iter()
        .filter_map(Block::mixture)
        .map(|mixture| {
            let bytes = match &mixture.experts {
                Experts::Quant(experts) => experts.size_bytes(),
                Experts::Dense(experts) => {
                    2 * (experts.gate_up.shape().num_elements()
                        + experts.down.shape().num_elements())
                }
            };
            let router = mixture.experts.router();
            let others = 1.0 - router.top_k as f64 / router.experts as f64;
            (bytes as f64 * (1.0 - others.powi(rows as i32))) as usize
        });
    norms + projections.sum::<usize>() + experts.sum::<usize>()
}

/// The time to the first token of every sequence, and the mean time of each later step, in seconds.
pub struct Times {
    pub first: f64,
    pub step: f64,
}

/// The minimum number of tokens of a prefill chunk, unless a prompt has fewer.
pub const CHUNK: usize = 512;

/// Returns an upper bound of the number of prefill steps of `batch` requests that are added
/// together, each with `prompt_tokens` tokens. Each step processes one chunk of prompts. The bound
/// is the maximum number of steps between the first token of any request and the first token of the
/// last one.
pub fn prefill_steps(batch: usize, prompt_tokens: usize) -> usize {
    batch * prompt_tokens.div_ceil(CHUNK).max(1)
}

/// Decodes once to compile and record all passes, and a second time to measure.
fn time(
    model: &Arc<Model>,
    [batch, prompt_tokens, new_tokens]: [usize; 3],
) -> Result<Times, BenchError> {
    let mut engine = Engine::new(model.clone(), batch).map_err(failed)?;
    let mut times = Times {
        first: 0.0,
        step: 0.0,
    };
    for (round, steps) in [(0, 3), (1, new_tokens)] {
        times.first = first_tokens(
            &mut engine,
            model.config().vocab_size,
            [batch, prompt_tokens, new_tokens],
            round,
        )?;
        let start = Instant::now();
        for _ in 1..steps {
            let tokens = step(&mut engine, batch)?;
            if tokens < batch {
                // With fewer sequences, the measured time would be too short.
                return Err(BenchError::Model(format!(
                    "{tokens} of {batch} sequences went on"
                )));
            }
        }
        times.step = start.elapsed().as_secs_f64() / (steps.max(2) - 1) as f64;
        for slot in 0..batch {
            engine.abort(slot);
        }
    }
    if !engine.is_captured() {
        println!("    steps were not recorded as a graph");
    }
    Ok(times)
}

/// Adds `batch` requests, prompts of `prompt_tokens` each, different ones in each round, and steps
/// until every one of them has its first token. Returns the seconds.
///
/// After the call, every sequence can decode at least `new_tokens - 1` more tokens.
pub fn first_tokens(
    engine: &mut Engine,
    vocab: usize,
    [batch, prompt_tokens, new_tokens]: [usize; 3],
    round: usize,
) -> Result<f64, BenchError> {
    let start = Instant::now();
    add_requests(engine, vocab, [batch, prompt_tokens, new_tokens], round)?;
    // Sequences whose prefill is complete decode during the prefill of the others.
    while step(engine, batch)? < batch {}
    Ok(start.elapsed().as_secs_f64())
}

/// Adds requests as [`first_tokens`] does, without any step.
pub fn add_requests(
    engine: &mut Engine,
    vocab: usize,
    [batch, prompt_tokens, new_tokens]: [usize; 3],
    round: usize,
) -> Result<(), BenchError> {
    let max_new_tokens = new_tokens + prefill_steps(batch, prompt_tokens);
    let options = RequestParams {
        max_new_tokens,
        ..RequestParams::default()
    };
    for sequence in 0..batch {
        let prompt: Vec<u32> = (0..prompt_tokens)
            .map(|i| ((i * 7919 + sequence * 104_729 + round) % vocab) as u32)
            .collect();
        engine.add_request(&prompt, &options).map_err(failed)?;
    }
    Ok(())
}

/// Takes one step, and returns the number of sequences that got a token.
pub fn step(engine: &mut Engine, batch: usize) -> Result<usize, BenchError> {
    let decoded = engine.step().map_err(failed)?;
    let tokens = decoded
        .iter()
        .filter(|decoded| decoded.token.is_some())
        .count();
    match tokens == decoded.len()
        && engine.sequences()
            + decoded
                .iter()
                .filter(|decoded| decoded.end.is_some())
                .count()
            == batch
    {
        true => Ok(tokens),
        false => Err(BenchError::Model(format!(
            "a sequence of {batch} failed or ended: {decoded:?}"
        ))),
    }
}

fn report(
    model: Preset,
    weights: Weights,
    [batch, prompt_tokens, new_tokens]: [usize; 3],
    page_size: usize,
    bytes: usize,
    times: Times,
    rates: Option<Rates>,
) -> StepFigure {
    let rate = bytes as f64 / times.step;
    let read_fraction = rates.map(|rates| rate / rates.read);
    let row = StepFigure {
        routine: "step",
        digest: record::STEP_DIGEST,
        model: value_name(model),
        weights: value_name(weights),
        batch,
        prompt_tokens,
        new_tokens,
        page_size: (page_size > 0).then_some(page_size),
        cache: None,
        head: None,
        ttft_ms: times.first * 1e3,
        prefill_tokens_per_second: (batch * prompt_tokens) as f64 / times.first,
        time_per_output_token_ms: times.step * 1e3,
        tokens_per_second: batch as f64 / times.step,
        weight_bytes: bytes,
        read_fraction,
    };
    println!(
        "{:16} {:8} {batch:>5} {new_tokens:>5} {page_size:>5}  {:>9.2} {:>11.0} {:>9.3} {:>10.1} {:>8.0} {:>6}",
        row.model,
        row.weights,
        row.ttft_ms,
        row.prefill_tokens_per_second,
        row.time_per_output_token_ms,
        row.tokens_per_second,
        rate / 1e9,
        row.read_fraction
            .map_or("-".into(), |fraction| format!("{:.1}%", fraction * 100.0))
    );
    row
}
