//! Quantises the experts of a mixture, and prints the changes in size, output and time.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use burn::tensor::{Device, DeviceType, FloatDType};
use burn_marlin::device::device_name;
use burn_marlin::{GroupSize, QuantSpec};
use clap::Parser;
use quantize_experts::{Comparison, MixtureError, Sizes, compare};

/// Quantises the experts of a mixture to 4 bits, and compares the result with the float mixture.
#[derive(Debug, Parser)]
#[command(name = "quantize-experts")]
struct Args {
    /// The device to run on; all but `flex` are features of this program.
    #[arg(long, default_value = "flex", value_parser = ["flex", "cuda", "vulkan"])]
    device: String,
    /// Features of a token.
    #[arg(long, default_value_t = 512)]
    hidden: usize,
    /// Features of a gate and an up of an expert.
    #[arg(long, default_value_t = 256)]
    intermediate: usize,
    /// Experts.
    #[arg(long, default_value_t = 16)]
    experts: usize,
    /// Experts of a token.
    #[arg(long, default_value_t = 4)]
    top_k: usize,
    /// Tokens of a forward pass.
    #[arg(long, default_value_t = 8)]
    tokens: usize,
    /// Rows of K that share a scale: g32, g64, g128 or channel.
    #[arg(long, default_value = "g128")]
    group: GroupSize,
    /// Zero points, which follow groups whose values are not around zero.
    #[arg(long)]
    zero_points: bool,
    /// Activations and float weights in f16 instead of f32.
    #[arg(long)]
    f16: bool,
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
        #[cfg(feature = "cuda")]
        "cuda" => DeviceType::Cuda,
        #[cfg(feature = "vulkan")]
        "vulkan" => DeviceType::Vulkan,
        _ => return None,
    };
    Device::enumerate(kind).into_iter().next()
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has closed the pipe, as in `quantize-experts | head`.
        Err(MixtureError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), MixtureError> {
    let device = open_device(&args.device).ok_or_else(|| MixtureError::Device {
        name: args.device.clone(),
    })?;
    let spec = QuantSpec::int4(args.group).with_zero_point(args.zero_points.into());
    let sizes = Sizes {
        hidden: args.hidden,
        intermediate: args.intermediate,
        experts: args.experts,
        top_k: args.top_k,
    };
    let dtype = if args.f16 {
        FloatDType::F16
    } else {
        FloatDType::F32
    };
    let comparison = compare(&sizes, args.tokens, &spec, dtype, args.runs, &device)?;
    print(&comparison, &device)?;
    Ok(())
}

fn print(comparison: &Comparison, device: &Device) -> std::io::Result<()> {
    let Comparison {
        bytes,
        times,
        relative_error,
    } = comparison;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", device_name(device))?;
    writeln!(out, "{:<20}{:>12}{:>12}", "", "before", "after")?;
    let [before, after] = bytes.map(|bytes| 1e-6 * bytes as f64);
    writeln!(out, "{:<20}{before:>12.2}{after:>12.2}", "experts, MB")?;
    let [before, after] = times.map(|time| 1e3 * time.as_secs_f64());
    writeln!(
        out,
        "{:<20}{before:>12.3}{after:>12.3}",
        "a forward pass, ms"
    )?;
    writeln!(
        out,
        "{:<20}{:>12}{relative_error:>12.4}",
        "relative error", ""
    )
}
