//! Times 4-bit weights and float weights on the host's cores, through Burn's Flex backend: layers,
//! and decoding with a model.

use crate::BenchError;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_marlin::{GroupSize, QuantLinear, QuantSpec, WeightQuantizer};
use clap::Args;
use marlin_lm::{Engine, LanguageModel, OpenOptions, RequestParams};
use serde::Serialize;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;
use time::OffsetDateTime;

/// The number of timed calls of the float module, and of the 4-bit module.
const CALLS: usize = 120;
/// The number of consecutive calls of one module. As in a model, the previous call is mostly of the
/// same kind, and leaves its data in the caches.
const RUN: usize = 10;
/// The bytes of all float copies of a layer. The copies are called in turn, so that weights come
/// from memory and not from a cache, as in a model.
const COPIES: usize = 256 << 20;
/// The number of hidden features of a block of BERT's base model; `INTERMEDIATE` is the number of
/// intermediate features.
const HIDDEN: usize = 768;
const INTERMEDIATE: usize = 3072;

/// The arguments of the host bench: rows of activations and models.
#[derive(Args)]
pub struct HostArgs {
    /// Rows of activations.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 128])]
    rows: Vec<usize>,
    /// Hugging Face folders of models to time, such as a float model and the same model in 4 bits.
    #[arg(long, value_delimiter = ',')]
    model: Vec<PathBuf>,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Tokens to decode after the prompt.
    #[arg(long, default_value_t = 64)]
    new_tokens: usize,
    /// Write a record of the run to this file.
    #[arg(long)]
    record: Option<PathBuf>,
}

/// The times of a module in float and in 4 bits.
#[derive(Debug, Serialize)]
struct LayerRow {
    layer: &'static str,
    rows: usize,
    /// The median time of a call, in microseconds.
    float_us: f64,
    int4_us: f64,
    /// `int4_us / float_us`.
    ratio: f64,
}

/// The rates of a model.
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
    /// The load average over a minute at the end of the run. If it is above `cores`, other programs
    /// used some of the cores.
    load: Option<f64>,
    date: String,
    format: String,
    version: &'static str,
    layers: Vec<LayerRow>,
    memory: Option<MemoryRow>,
    models: Vec<ModelRow>,
}

/// The memory of the process during the conversion of a model, in megabytes.
#[derive(Debug, Serialize)]
struct MemoryRow {
    model: &'static str,
    float_mb: f64,
    int4_mb: f64,
    /// The peak memory during the conversion, minus the memory of the float model.
    peak_above_float_mb: f64,
}

/// The linear layers of a block of BERT, without attention and activation functions.
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
        let mixed =
            self.query.forward(x.clone()) + self.key.forward(x.clone()) + self.value.forward(x);
        self.down
            .forward(self.up.forward(self.output.forward(mixed)))
    }
}

/// Times layers and models, prints a line for each, and writes the record.
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
        memory: None,
        models: Vec::new(),
    };
    println!(
        "{}, {} cores, Flex, f32, {spec}",
        record.processor, record.cores
    );
    println!(
        "{:32} {:>5} {:>10} {:>10} {:>6}",
        "layer", "rows", "float us", "int4 us", "ratio"
    );
    for &rows in &args.rows {
        record.layers.extend(layers(rows, &spec, &device)?);
    }
    record.memory = memory(&spec, &device)?;
    for folder in &args.model {
        record.models.push(model(folder, args, &device)?);
    }
    record.load = std::fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split(' ').next()?.parse().ok());
    if let Some(path) = &args.record {
        let text = serde_json::to_string_pretty(&record)? + "\n";
        std::fs::write(path, text).map_err(|source| BenchError::File {
            path: path.clone(),
            source,
        })?;
    }
    Ok(())
}

fn layers(rows: usize, spec: &QuantSpec, device: &Device) -> Result<Vec<LayerRow>, BenchError> {
    let random =
        |features: usize| Tensor::<2>::random([rows, features], Distribution::Default, device);
    let convert = WeightQuantizer::new(*spec);
    let mut out = Vec::new();

    let linear = copies(|| LinearConfig::new(HIDDEN, INTERMEDIATE).init(device));
    let packed: Vec<_> = linear
        .iter()
        .map(|linear| QuantLinear::from_linear(linear, spec))
        .collect::<Result<_, _>>()
        .map_err(failed)?;
    let x = random(HIDDEN);
    out.push(row(
        "QuantLinear 768 x 3072",
        rows,
        &linear,
        &packed,
        |linear| linear.forward(x.clone()),
        |packed| packed.forward(x.clone()),
    ));
    let converted_linear = converted(&linear, &convert)?;
    let forward = |linear: &Linear| linear.forward(x.clone());
    out.push(row(
        "converted Linear 768 x 3072",
        rows,
        &linear,
        &converted_linear,
        forward,
        forward,
    ));
    drop((linear, packed, converted_linear));

    let block = copies(|| Block::new(device));
    let forward = |block: &Block| block.forward(x.clone());
    out.push(row(
        "converted BERT block's Linears",
        rows,
        &block,
        &converted(&block, &convert)?,
        forward,
        forward,
    ));
    drop(block);

    let lstm: Vec<Lstm> = copies(|| LstmConfig::new(512, 512, true).init(device));
    let x = random(512).reshape([rows, 1, 512]);
    let forward = |lstm: &Lstm| lstm.forward(x.clone(), None).0;
    out.push(row(
        "converted LSTM 512, one step",
        rows,
        &lstm,
        &converted(&lstm, &convert)?,
        forward,
        forward,
    ));
    Ok(out)
}

/// Converts twelve blocks of BERT, and returns the memory that the conversion takes; `None` if the
/// system does not report a process's memory.
fn memory(spec: &QuantSpec, device: &Device) -> Result<Option<MemoryRow>, BenchError> {
    const MB: f64 = 1e6;
    let model: Vec<Block> = (0..12).map(|_| Block::new(device)).collect();
    // Parameters are initialised when they are first used.
    let float_mb = model
        .iter()
        .map(|block| 4.0 * block.num_params() as f64)
        .sum::<f64>()
        / MB;
    model
        .iter()
        .for_each(|block| _ = black_box(block.forward(Tensor::zeros([1, HIDDEN], device))));
    // Resets the peak to the current memory of the process.
    let reset = std::fs::write("/proc/self/clear_refs", "5");
    let peak = || kilobytes("/proc/self/status", "VmHWM:");
    let Some(before) = peak().filter(|_| reset.is_ok()) else {
        return Ok(None);
    };
    let (model, report) = WeightQuantizer::new(*spec)
        .quantize(model)
        .map_err(failed)?;
    let Some(peak) = peak() else { return Ok(None) };
    drop(model);
    let row = MemoryRow {
        model: "12 BERT blocks' Linears",
        float_mb,
        int4_mb: report.converted_bytes()[1] as f64 / MB,
        peak_above_float_mb: 1024.0 * (peak as f64 - before as f64) / MB,
    };
    println!(
        "converting {}: float {:.0} MB, int4 {:.0} MB, peak {:.0} MB above float",
        row.model, row.float_mb, row.int4_mb, row.peak_above_float_mb
    );
    Ok(Some(row))
}

/// Returns a value, in units of 1024 bytes, from a Linux file that has one line for each value,
/// such as `/proc/meminfo`.
pub fn kilobytes(path: &str, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(path).ok()?;
    status.lines().find_map(|line| {
        line.strip_prefix(name)?
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    })
}

/// Creates enough modules to take [`COPIES`] bytes in f32.
fn copies<M: Module>(module: impl Fn() -> M) -> Vec<M> {
    let first = module();
    let count = COPIES.div_ceil(4 * first.num_params()).max(1);
    std::iter::once(first)
        .chain((1..count).map(|_| module()))
        .collect()
}

fn converted<M: Module>(modules: &[M], convert: &WeightQuantizer) -> Result<Vec<M>, BenchError> {
    modules
        .iter()
        .map(|module| {
            convert
                .quantize(module.clone())
                .map(|(module, _)| module)
                .map_err(failed)
        })
        .collect()
}

/// Times the float and the 4-bit module in alternating runs, so that other load on the machine
/// affects both modules.
fn row<F, Q, A, B>(
    layer: &'static str,
    rows: usize,
    float: &[F],
    int4: &[Q],
    float_call: impl Fn(&F) -> A,
    int4_call: impl Fn(&Q) -> B,
) -> LayerRow {
    let (mut float_times, mut int4_times) = (Vec::with_capacity(CALLS), Vec::with_capacity(CALLS));
    let (mut float, mut int4) = (float.iter().cycle(), int4.iter().cycle());
    for _ in 0..CALLS.div_ceil(RUN) {
        float_times.extend(
            float
                .by_ref()
                .take(RUN)
                .map(|float| seconds(|| float_call(float))),
        );
        int4_times.extend(
            int4.by_ref()
                .take(RUN)
                .map(|int4| seconds(|| int4_call(int4))),
        );
    }
    let (float_us, int4_us) = (
        1e6 * median(&mut float_times),
        1e6 * median(&mut int4_times),
    );
    let row = LayerRow {
        layer,
        rows,
        float_us,
        int4_us,
        ratio: int4_us / float_us,
    };
    println!(
        "{layer:32} {rows:>5} {float_us:>10.1} {int4_us:>10.1} {:>6.2}",
        row.ratio
    );
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

/// Times the prompt and decoding of a model, and returns the best of three runs.
fn model(folder: &Path, args: &HostArgs, device: &Device) -> Result<ModelRow, BenchError> {
    let options = OpenOptions {
        max_len: Some(args.prompt + args.new_tokens),
        with_tokenizer: false,
        ..OpenOptions::default()
    };
    let llama = LanguageModel::open(folder, device, &options).map_err(failed)?;
    let prompt: Vec<u32> = (0..args.prompt as u32)
        .map(|i| i * 37 % llama.model.config().vocab_size as u32)
        .collect();
    let (mut prompt_rate, mut decode_rate) = (0f64, 0f64);
    for _ in 0..3 {
        let mut engine = Engine::new(llama.model.clone(), 1).map_err(failed)?;
        let options = RequestParams {
            max_new_tokens: args.new_tokens,
            ..RequestParams::default()
        };
        let start = Instant::now();
        engine.add_request(&prompt, &options).map_err(failed)?;
        engine.step().map_err(failed)?;
        let first = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let mut steps = 0;
        while engine.sequences() > 0 {
            engine.step().map_err(failed)?;
            steps += 1;
        }
        prompt_rate = prompt_rate.max(args.prompt as f64 / first);
        decode_rate = decode_rate.max(f64::from(steps) / start.elapsed().as_secs_f64());
    }
    let row = ModelRow {
        folder: folder
            .file_name()
            .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        prompt_tokens: args.prompt,
        prompt_tokens_per_second: prompt_rate,
        new_tokens: args.new_tokens,
        decode_tokens_per_second: decode_rate,
    };
    println!(
        "{:32} prompt {prompt_rate:.1} tokens/s, decode {decode_rate:.1} tokens/s",
        row.folder
    );
    Ok(row)
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Model(error.to_string())
}

/// Returns the name of the processor that Linux reports.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split(':').nth(1));
    name.map_or_else(|| "unknown".into(), |name| name.trim().to_owned())
}
