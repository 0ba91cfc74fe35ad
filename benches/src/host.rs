//! Weights of 4 bits against float ones on the host's cores, through Burn's Flex backend: layers, and decode of a model.

use crate::BenchError;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_marlin::{GroupSize, QuantSpec, W4A16, W4A16Linear};
use clap::Args;
use marlin_llama::{Decoder, Llama, OpenOptions, Sampling, SequenceOptions};
use serde::Serialize;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;
use time::OffsetDateTime;

/// Calls that are timed in all, of each of the two in turn.
const CALLS: usize = 101;
/// Hidden and intermediate features of a block of BERT's base model.
const HIDDEN: usize = 768;
const INTERMEDIATE: usize = 3072;

/// What is timed.
#[derive(Args)]
pub struct HostArgs {
    /// Rows of activations.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 128])]
    rows: Vec<usize>,
    /// Hugging Face folders to decode with, such as one in float and one of its weights in 4 bits.
    #[arg(long, value_delimiter = ',')]
    model: Vec<PathBuf>,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Tokens that follow it.
    #[arg(long, default_value_t = 64)]
    new_tokens: usize,
    /// Write a record of the run to this file.
    #[arg(long)]
    record: Option<PathBuf>,
}

/// A module, in float and in 4 bits.
#[derive(Debug, Serialize)]
struct LayerRow {
    layer: &'static str,
    rows: usize,
    /// Median microseconds of a call.
    float_us: f64,
    int4_us: f64,
    /// The second over the first.
    ratio: f64,
}

/// A model's folder.
#[derive(Debug, Serialize)]
struct ModelRow {
    folder: String,
    prompt_tokens: usize,
    prompt_tokens_per_second: f64,
    new_tokens: usize,
    decode_tokens_per_second: f64,
}

#[derive(Debug, Serialize)]
struct Record {
    processor: String,
    cores: usize,
    /// Programs that wanted a core at the end of the run, on average over a minute: above the cores, others took part of them.
    load: Option<f64>,
    date: String,
    format: String,
    version: &'static str,
    layers: Vec<LayerRow>,
    models: Vec<ModelRow>,
}

/// The linear layers of a block of BERT, one after the other.
#[derive(Module, Debug)]
struct Block {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        let linear = |k, n| LinearConfig::new(k, n).init(device);
        Self {
            query: linear(HIDDEN, HIDDEN),
            key: linear(HIDDEN, HIDDEN),
            value: linear(HIDDEN, HIDDEN),
            output: linear(HIDDEN, HIDDEN),
            up: linear(HIDDEN, INTERMEDIATE),
            down: linear(INTERMEDIATE, HIDDEN),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mixed = self.query.forward(x.clone()) + self.key.forward(x.clone()) + self.value.forward(x);
        self.down.forward(self.up.forward(self.output.forward(mixed)))
    }
}

/// Times layers and models, prints a line each, and writes the record.
pub fn run(args: &HostArgs) -> Result<(), BenchError> {
    let (device, spec) = (Device::flex(), QuantSpec::int4(GroupSize::G64));
    let mut record = Record {
        processor: processor(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        load: None,
        date: OffsetDateTime::now_utc().date().to_string(),
        format: spec.to_string(),
        version: env!("CARGO_PKG_VERSION"),
        layers: Vec::new(),
        models: Vec::new(),
    };
    println!("{}, {} cores, Flex, f32, {spec}", record.processor, record.cores);
    println!("{:32} {:>5} {:>10} {:>10} {:>6}", "layer", "rows", "float us", "int4 us", "ratio");
    for &rows in &args.rows {
        record.layers.extend(layers(rows, &spec, &device)?);
    }
    for folder in &args.model {
        record.models.push(model(folder, args, &device)?);
    }
    record.load = std::fs::read_to_string("/proc/loadavg").ok().and_then(|text| text.split(' ').next()?.parse().ok());
    if let Some(path) = &args.record {
        let text = serde_json::to_string_pretty(&record)? + "\n";
        std::fs::write(path, text).map_err(|source| BenchError::File { path: path.clone(), source })?;
    }
    Ok(())
}

fn layers(rows: usize, spec: &QuantSpec, device: &Device) -> Result<Vec<LayerRow>, BenchError> {
    let random = |features: usize| Tensor::<2>::random([rows, features], Distribution::Default, device);
    let convert = W4A16::new(*spec);
    let mut out = Vec::new();

    let linear = LinearConfig::new(HIDDEN, INTERMEDIATE).init(device);
    let packed = W4A16Linear::from_linear(&linear, spec).map_err(failed)?;
    let (converted, _) = convert.quantize(linear.clone()).map_err(failed)?;
    let x = random(HIDDEN);
    let (float, int4) = (|| linear.forward(x.clone()), || packed.forward(x.clone()));
    out.push(row("W4A16Linear 768 x 3072", rows, float, int4));
    let (float, int4) = (|| linear.forward(x.clone()), || converted.forward(x.clone()));
    out.push(row("converted Linear 768 x 3072", rows, float, int4));

    let block = Block::new(device);
    let (converted, _) = convert.quantize(block.clone()).map_err(failed)?;
    let (float, int4) = (|| block.forward(x.clone()), || converted.forward(x.clone()));
    out.push(row("converted BERT block's Linears", rows, float, int4));

    let lstm: Lstm = LstmConfig::new(512, 512, true).init(device);
    let (converted, _) = convert.quantize(lstm.clone()).map_err(failed)?;
    let x = random(512).reshape([rows, 1, 512]);
    let (float, int4) = (|| lstm.forward(x.clone(), None).0, || converted.forward(x.clone(), None).0);
    out.push(row("converted LSTM 512, one step", rows, float, int4));
    Ok(out)
}

/// Times two in turn, so that what else the machine does meets both.
fn row<A, B>(layer: &'static str, rows: usize, float: impl Fn() -> A, int4: impl Fn() -> B) -> LayerRow {
    let (mut float_times, mut int4_times) = (Vec::with_capacity(CALLS), Vec::with_capacity(CALLS));
    for _ in 0..CALLS {
        float_times.push(seconds(&float));
        int4_times.push(seconds(&int4));
    }
    let (float_us, int4_us) = (1e6 * median(&mut float_times), 1e6 * median(&mut int4_times));
    let row = LayerRow { layer, rows, float_us, int4_us, ratio: int4_us / float_us };
    println!("{layer:32} {rows:>5} {float_us:>10.1} {int4_us:>10.1} {:>6.2}", row.ratio);
    row
}

fn seconds<T>(call: impl Fn() -> T) -> f64 {
    let start = Instant::now();
    black_box(call());
    start.elapsed().as_secs_f64()
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The best of three runs.
fn model(folder: &Path, args: &HostArgs, device: &Device) -> Result<ModelRow, BenchError> {
    let options = OpenOptions { max_len: Some(args.prompt + args.new_tokens), with_tokenizer: false, ..OpenOptions::default() };
    let llama = Llama::open(folder, device, &options).map_err(failed)?;
    let prompt: Vec<u32> = (0..args.prompt as u32).map(|i| i * 37 % llama.model.config().vocab_size as u32).collect();
    let (mut prompt_rate, mut decode_rate) = (0f64, 0f64);
    for _ in 0..3 {
        let mut decoder = Decoder::new(&llama.model, 1).map_err(failed)?;
        let options = SequenceOptions { sampling: Sampling::GREEDY, seed: 0, stop_tokens: Vec::new(), max_new_tokens: args.new_tokens };
        let start = Instant::now();
        decoder.join(&prompt, &options).map_err(failed)?;
        decoder.step().map_err(failed)?;
        let first = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let mut steps = 0;
        while decoder.sequences() > 0 {
            decoder.step().map_err(failed)?;
            steps += 1;
        }
        prompt_rate = prompt_rate.max(args.prompt as f64 / first);
        decode_rate = decode_rate.max(f64::from(steps) / start.elapsed().as_secs_f64());
    }
    let row = ModelRow {
        folder: folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        prompt_tokens: args.prompt,
        prompt_tokens_per_second: prompt_rate,
        new_tokens: args.new_tokens,
        decode_tokens_per_second: decode_rate,
    };
    println!("{:32} prompt {prompt_rate:.1} tokens/s, decode {decode_rate:.1} tokens/s", row.folder);
    Ok(row)
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Model(error.to_string())
}

/// The processor as Linux names it.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split(':').nth(1));
    name.map_or_else(|| "unknown".into(), |name| name.trim().to_owned())
}
