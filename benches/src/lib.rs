//! Times the kernels on an NVIDIA card and on the host's cores, and the reading of checkpoints, as
//! described in the README of this folder: `cargo xtask bench kernels`.
//!
//! All benches are one program. The crate is also a library with one function, [`main`], so that a
//! binary that combines several programs can contain the benches.

mod convert;
#[cfg(feature = "cuda")]
mod decode;
#[cfg(feature = "cuda")]
mod folder;
mod host;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod moe;
#[cfg(feature = "cuda")]
mod operands;
#[cfg(feature = "cuda")]
mod paged;
#[cfg(feature = "cuda")]
mod parts;
#[cfg(feature = "cuda")]
mod preset;
#[cfg(feature = "cuda")]
mod prompts;
#[cfg(feature = "cuda")]
mod quantize;
#[cfg(feature = "cuda")]
mod record;
#[cfg(feature = "cuda")]
mod repack;
#[cfg(feature = "cuda")]
mod shapes;
#[cfg(feature = "cuda")]
mod timing;
#[cfg(feature = "cuda")]
mod weights;

use clap::{Args, Parser, Subcommand};
use marlin_format::GroupSize;
#[cfg(feature = "cuda")]
use marlin_format::WeightValue;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Benches of burn-marlin.
#[derive(Parser)]
#[command(name = "burn-marlin-bench")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Time W4A16 matmuls of Llama's shapes.
    #[cfg(feature = "cuda")]
    Kernels(KernelArgs),
    /// Time decoding of Llama with generated weights.
    #[cfg(feature = "cuda")]
    Decode(decode::DecodeArgs),
    /// Time the first token of prompts with generated weights.
    #[cfg(feature = "cuda")]
    Prompts(prompts::PromptArgs),
    /// Time layers of mixtures of experts with generated weights.
    #[cfg(feature = "cuda")]
    Moe(moe::MoeArgs),
    /// Time GPTQ on a folder with generated weights.
    #[cfg(feature = "cuda")]
    Quantize(quantize::QuantizeArgs),
    /// Time the repacking of the weights of Llama 2 70B from the plain to the tile layout.
    #[cfg(feature = "cuda")]
    Repack,
    /// Write a folder of random weights in the shape of a known model, for a server. Needs no card.
    #[cfg(feature = "cuda")]
    Folder(folder::FolderArgs),
    /// Time the reading of checkpoint layers in every format. Needs no card.
    Convert(ConvertArgs),
    /// Time 4-bit weights and float weights on the host's cores. Needs no card.
    Host(host::HostArgs),
}

/// The arguments of the kernel bench: formats and shapes.
#[cfg(feature = "cuda")]
#[derive(Args)]
struct KernelArgs {
    /// Names of shapes; by default all.
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<String>,
    /// Rows of activations.
    #[arg(long, value_delimiter = ',', default_values_t = shapes::ROWS)]
    m: Vec<usize>,
    /// Values of a weight: integers of 4 or 8 bits, e2m1 or e4m3.
    #[arg(long, default_value = "4")]
    bits: WeightValue,
    /// Group size: 16, 32, 64, 128, or -1 for a whole column.
    #[arg(long, default_value = "128", allow_hyphen_values = true, value_parser = group)]
    group: GroupSize,
    /// Use weights with zero points.
    #[arg(long)]
    zero_points: bool,
    /// Use weights with act-order.
    #[arg(long)]
    act_order: bool,
    /// Use 2:4 weights; the floor is computed from their bytes.
    #[arg(long)]
    sparse: bool,
    /// Allow activations in e4m3 (W8A8), with weights of e4m3.
    #[arg(long)]
    w8a8: bool,
    /// Use bf16 instead of f16 for activations and scales.
    #[arg(long)]
    bf16: bool,
    /// Time every tile instead of the planned one.
    #[arg(long)]
    every_tile: bool,
    /// Write a record of the run to this file.
    #[arg(long)]
    record: Option<PathBuf>,
}

/// The arguments of the convert bench: the checkpoint formats to read.
#[derive(Args)]
struct ConvertArgs {
    /// Read only formats with all of these words in their names, such as `gptq int8`.
    words: Vec<String>,
    /// Group size: 32, 64, 128, or -1 for a whole column.
    #[arg(long, default_value = "128", allow_hyphen_values = true, value_parser = group)]
    group: GroupSize,
}

fn group(text: &str) -> Result<GroupSize, String> {
    let rows: i64 = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    GroupSize::try_from(rows).map_err(|error| error.to_string())
}

/// An error of a bench.
#[derive(Debug, thiserror::Error)]
enum BenchError {
    #[cfg(feature = "cuda")]
    #[error("the first CUDA device is no NVIDIA card that CubeCL knows")]
    Card,
    #[cfg(feature = "cuda")]
    #[error("--shapes: `{0}` is no shape of this bench; they are {names}", names = shapes::names())]
    Shape(String),
    #[cfg(feature = "cuda")]
    #[error("no tile of the kernel fits this card")]
    NoTile,
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Kernel(#[from] marlin_kernels::KernelError),
    #[cfg(feature = "cuda")]
    #[error("the device failed: {0}")]
    Device(String),
    #[error(transparent)]
    Checkpoint(#[from] marlin_format::checkpoint::CheckpointError),
    #[error("{0}")]
    Model(String),
    #[error("cannot write {path}", path = path.display())]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the record is no JSON")]
    Json(#[from] serde_json::Error),
}

/// Runs the bench that the arguments name, and returns the exit status. The first argument is the
/// program's name.
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let result = match Cli::parse_from(args).command {
        #[cfg(feature = "cuda")]
        Command::Kernels(args) => kernels::run(&args),
        #[cfg(feature = "cuda")]
        Command::Decode(args) => decode::run(&args),
        #[cfg(feature = "cuda")]
        Command::Prompts(args) => prompts::run(&args),
        #[cfg(feature = "cuda")]
        Command::Moe(args) => moe::run(&args),
        #[cfg(feature = "cuda")]
        Command::Quantize(args) => quantize::run(&args),
        #[cfg(feature = "cuda")]
        Command::Folder(args) => folder::run(&args),
        #[cfg(feature = "cuda")]
        Command::Repack => repack::run(),
        Command::Convert(args) => convert::run(&args),
        Command::Host(args) => host::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
