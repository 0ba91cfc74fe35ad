//! Converts an ordinary Burn model to 4-bit weights, and prints the changes in size, output and
//! time.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use burn::tensor::{Device, DeviceType, FloatDType};
use burn_marlin::device::device_name;
use burn_marlin::{GroupSize, QuantSpec};
use clap::Parser;
use convert_model::{CompareError, Comparison, Options, Run, compare};

/// Converts a transformer of Burn's own layers to 4-bit weights with one call, and compares the
/// result with the float model.
#[derive(Debug, Parser)]
#[command(name = "convert-model")]
struct Args {
    /// The device to run on; all but `flex` are features of this program.
    #[arg(long, default_value = "flex", value_parser = ["flex", "cpu", "cuda", "vulkan"])]
    device: String,
    /// Features of a row: a multiple of 64.
    #[arg(long, default_value_t = 512)]
    hidden: usize,
    /// Layers of the encoder.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Rows of activations of a forward pass.
    #[arg(long, default_value_t = 8)]
    rows: usize,
    /// Rows of K that share a scale: g32, g64, g128 or channel.
    #[arg(long, default_value = "g128")]
    group: GroupSize,
    /// Round to 8 bits instead of 4.
    #[arg(long)]
    int8: bool,
    /// Activations and float weights in f32 instead of f16.
    #[arg(long)]
    f32: bool,
    /// Forward passes that are timed.
    #[arg(long, default_value_t = 9)]
    runs: usize,
}

/// Opens the first device of a kind; `None` if this build lacks the feature or the machine lacks
/// the device.
fn open_device(name: &str) -> Option<Device> {
    let kind = match name {
        #[cfg(feature = "flex")]
        "flex" => DeviceType::Flex,
        #[cfg(feature = "cpu")]
        "cpu" => DeviceType::Cpu,
        #[cfg(feature = "cuda")]
        "cuda" => DeviceType::Cuda,
        #[cfg(feature = "vulkan")]
        "vulkan" => DeviceType::Vulkan,
        _ => return None,
    };
    Device::enumerate(kind).into_iter().next()
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has closed the pipe, as in `convert-model | head`.
        Err(CompareError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), CompareError> {
    // This call must precede the first tensor; after the call, Burn's fusion supports packed
    // weights.
    burn_marlin::install()?;
    let device = open_device(&args.device).ok_or_else(|| CompareError::Device {
        name: args.device.clone(),
    })?;
    let spec = if args.int8 {
        QuantSpec::int8(args.group)
    } else {
        QuantSpec::int4(args.group)
    };
    let dtype = if args.f32 {
        FloatDType::F32
    } else {
        FloatDType::F16
    };
    let options = Options {
        hidden: args.hidden,
        layers: args.layers,
        rows: args.rows,
        dtype,
        spec,
        runs: args.runs,
    };
    let comparison = compare(&options, &device)?;
    print(&comparison, &device)?;
    Ok(())
}

fn print(comparison: &Comparison, device: &Device) -> std::io::Result<()> {
    let Comparison {
        report,
        before,
        after,
    } = comparison;
    let milliseconds = |run: &Run| 1e3 * run.time.as_secs_f64();
    let [float, packed] = report.total_bytes();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}\n{report}", device_name(device))?;
    writeln!(out, "{:<20}{:>12}{:>12}", "", "before", "after")?;
    writeln!(
        out,
        "{:<20}{:>12.2}{:>12.2}",
        "weights, MB",
        1e-6 * float as f64,
        1e-6 * packed as f64
    )?;
    writeln!(
        out,
        "{:<20}{:>12.3}{:>12.3}",
        "a forward pass, ms",
        milliseconds(before),
        milliseconds(after)
    )?;
    writeln!(
        out,
        "{:<20}{:>12}{:>12.4}",
        "relative error",
        "",
        comparison.relative_error()
    )?;
    let uses = after.uses;
    if uses.fused + uses.dequantized == 0 {
        writeln!(
            out,
            "This device fuses no operations: each Linear gets a float weight for the time of its call."
        )
    } else {
        writeln!(
            out,
            "In one forward pass {} matmuls read the packed weight, {} float weights were made.",
            uses.fused, uses.dequantized
        )
    }
}
