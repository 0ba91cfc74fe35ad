//! Runs, checks and times the steps of the ladder.

mod record;
mod timing;

use clap::{Parser, ValueEnum};
use cubecl::client::Client;
use ladder::data::{Buffers, Data, TOLERANCE};
use ladder::{LadderError, STEPS, Step, problem};
use marlin_kernels::QuantProblem;
use record::StepFigure;
use std::path::PathBuf;
use std::process::ExitCode;

/// The bytes of all copies of the weight: four times the second-level cache of an H200 (60 MB), so
/// that no call finds its weight in the cache.
const WEIGHT_BYTES: usize = 240_000_000;

/// A 4-bit matmul in six steps, from one thread per output to the Marlin kernel.
#[derive(Parser)]
#[command(name = "ladder")]
struct Cli {
    /// The device that runs the steps; without a GPU, steps 1 to 3.
    #[arg(long, value_enum, default_value_t = if cfg!(feature = "cuda") { Device::Cuda } else { Device::Cpu })]
    device: Device,
    /// Steps to run, 1 to 6; by default all that the device supports.
    #[arg(long = "step", value_delimiter = ',', value_parser = step)]
    steps: Vec<Step>,
    /// Rows of activations.
    #[arg(long = "rows", value_delimiter = ',', default_values_t = [1, 16, 64])]
    rows: Vec<usize>,
    /// Input and output features of the weight, as KxN.
    #[arg(long, default_value = "8192x8192", value_parser = shape)]
    shape: [usize; 2],
    /// Read rate of the card's memory, in TB/s; the default was measured on an H200 with a plain
    /// read of 4 GiB.
    #[arg(long, default_value_t = 4.37)]
    read_rate: f64,
    /// Seed of the random operands.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only check the results, without timing.
    #[arg(long)]
    check: bool,
    /// Write a record of the run to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    Cuda,
    Cpu,
}

impl Device {
    fn client(self) -> Result<Client, LadderError> {
        let device = match self {
            Self::Cuda => cubecl::Device::cuda(0),
            Self::Cpu => cubecl::Device::cpu(),
        };
        Ok(device?.client())
    }
}

fn step(text: &str) -> Result<Step, String> {
    let found = STEPS
        .into_iter()
        .find(|step| step.number.to_string() == text);
    found.ok_or_else(|| format!("`{text}` is no step; they are 1 to {}", STEPS.len()))
}

fn shape(text: &str) -> Result<[usize; 2], String> {
    let parts = text
        .split_once('x')
        .and_then(|(k, n)| Some([k.parse().ok()?, n.parse().ok()?]));
    parts.ok_or_else(|| format!("`{text}` is no shape; write K and N as 4096x12288"))
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<(), LadderError> {
    let client = cli.device.client()?;
    let [k, n] = cli.shape;
    let on_device = |step: &Step| cli.device == Device::Cuda || !step.needs_cuda();
    let steps: Vec<Step> = if cli.steps.is_empty() {
        STEPS.into_iter().filter(on_device).collect()
    } else {
        cli.steps.clone()
    };
    // All steps are checked before the first step runs, which may take long.
    for step in &steps {
        step.check_device(&client)?;
        cli.rows
            .iter()
            .try_for_each(|&m| step.check(&problem(m, k, n)))?;
    }

    let name = client.properties().identity.name.clone();
    let data = Data::random(cli.rows.iter().copied().max().unwrap_or(1), k, n, cli.seed)?;
    let copies = if cli.check || cli.device == Device::Cpu {
        1
    } else {
        WEIGHT_BYTES.div_ceil(k * n / 2)
    };
    let buffers = Buffers::new(&client, &data, &steps, copies)?;
    println!(
        "{name}: {}, {copies} copies of the weight",
        problem(1, k, n).spec()
    );
    println!(
        "{:>5} {:>6} {:>6}  step {:16} {:>10} {:>8} {:>10}",
        "M", "K", "N", "", "us", "floor", "error"
    );
    let mut rows = Vec::new();
    for &m in &cli.rows {
        let problem = problem(m, k, n);
        for step in &steps {
            rows.extend(measure(
                cli, &client, &data, &buffers, copies, step, &problem,
            )?);
        }
    }
    match &cli.json {
        Some(path) => record::write(path, &name, &rows),
        None => Ok(()),
    }
}

/// Checks a step, times it unless `--check` is given, and prints a line.
fn measure(
    cli: &Cli,
    client: &Client,
    data: &Data,
    buffers: &Buffers,
    copies: usize,
    step: &Step,
    problem: &QuantProblem,
) -> Result<Option<StepFigure>, LadderError> {
    let (m, k, n) = (problem.m, problem.k(), problem.n());
    let error = data.relative_error(&buffers.run(client, step, problem)?);
    let line = format!("{m:>5} {k:>6} {n:>6}  {:>4} {:16}", step.number, step.name);
    if error > TOLERANCE {
        return Err(LadderError::Wrong {
            step: step.number,
            problem: problem.to_string(),
            error,
            tolerance: TOLERANCE,
        });
    }
    if cli.check {
        println!("{line} {:>10} {:>8} {error:>10.1e}", "-", "-");
        return Ok(None);
    }
    let us = timing::time(client, copies, |call| {
        step.launch(client, problem, buffers.args(step, problem, call, None))
    })?;
    let floor_us = (cli.device == Device::Cuda).then(|| floor(problem, cli.read_rate));
    let share = floor_us.map_or("-".into(), |floor| format!("{:.1}%", floor / us * 100.0));
    println!("{line} {us:>10.2} {share:>8} {error:>10.1e}");
    #[cfg(feature = "cuda")]
    let text = ladder::source::digest(client, step.number, problem);
    #[cfg(not(feature = "cuda"))]
    let text = None;
    Ok(Some(StepFigure {
        routine: "ladder",
        text,
        step: step.number,
        name: step.name,
        m,
        k,
        n,
        us,
        floor_us,
        relative_error: error,
    }))
}

/// Returns the time in microseconds to read or write every operand once at `rate` TB/s.
fn floor(problem: &QuantProblem, rate: f64) -> f64 {
    let (m, n, k) = (problem.m as f64, problem.n() as f64, problem.k() as f64);
    // A weight takes 4 bits, and each 128 weights take a scale of 2 bytes.
    (k * n * (0.5 + 2.0 / 128.0) + 2.0 * m * (k + n)) / rate / 1e6
}
