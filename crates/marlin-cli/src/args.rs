//! The command line.

use crate::device::DeviceName;
use crate::plot::PlotFile;
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use marlin_format::{Bits, GroupSize};
use marlin_llama::{OpenOptions, Override, SampleOptions};
use std::error::Error;
use std::path::PathBuf;

/// Look into Llama checkpoints, quantise them to 4 or 8 bits, run them.
///
/// Logs go to standard error; `RUST_LOG=debug` shows the kernel of every layer. Compiled kernels
/// are kept in `burn-marlin` in the user's cache folder; `BURN_MARLIN_CACHE` names another folder,
/// or is `off`.
#[derive(Debug, Parser)]
#[command(name = "burn-marlin", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the contents of a checkpoint: every tensor and quantised layer, its format, size, bits
    /// per weight and kernel.
    Inspect(InspectArgs),
    /// Quantise a float checkpoint to 4 or 8 bits, into a new folder that other engines load too
    /// (compressed-tensors or GPTQ).
    Quantize(QuantizeArgs),
    /// Continue a prompt.
    Generate(GenerateArgs),
    /// Talk to a model, a line at a time, in the turns of its chat template.
    Chat(ChatArgs),
    /// Measure how well a model predicts a text.
    Perplexity(PerplexityArgs),
    /// Compare models with the one that they were made from: perplexity, divergence and agreement
    /// of their next tokens.
    Evaluate(EvaluateArgs),
    /// The logits after a sequence of tokens, as JSON, to compare with another implementation.
    Logits(LogitsArgs),
    /// List the kernel that runs each layer, and the reason.
    Kernels(KernelsArgs),
}

/// A checkpoint and the device that it runs on.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Hugging Face folder.
    pub dir: PathBuf,
    /// The device to run on; without it the best device present: cuda, vulkan, flex.
    #[arg(long)]
    pub device: Option<DeviceName>,
    /// Dtype of activations; without it the checkpoint's, where the device computes in it.
    #[arg(long)]
    pub dtype: Option<DtypeName>,
    #[arg(long, help = format!("Positions of the cache; without it {}, or the model's own limit if that is less", OpenOptions::DEFAULT_MAX_LEN))]
    pub max_len: Option<usize>,
    /// Round a float output head to 4 or 8 bits, groups of 128; without it the head stays as it is.
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(i64).try_map(Bits::try_from))]
    pub head: Option<Bits>,
}

/// The part of a text that models are measured on.
#[derive(Debug, Args)]
pub struct WindowArgs {
    /// Tokens in a window; windows do not overlap.
    #[arg(long, default_value_t = 512)]
    pub window: usize,
    /// Use this many tokens from the beginning of a text.
    #[arg(long)]
    pub max_tokens: Option<usize>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum DtypeName {
    F16,
    Bf16,
    F32,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Hugging Face folder.
    pub dir: PathBuf,
    /// The device to choose kernels for; without it the best one present: cuda, vulkan, flex.
    #[arg(long)]
    pub device: Option<DeviceName>,
    /// Print a line for every tensor and layer; without it, equal tensors and layers of consecutive
    /// blocks share a line.
    #[arg(long)]
    pub all: bool,
    /// Print JSON, always with every tensor and layer.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum FormatName {
    /// compressed-tensors, pack-quantized: the format of llm-compressor, which vLLM and
    /// transformers read.
    CompressedTensors,
    /// GPTQ, version 2: the format of GPTQModel.
    Gptq,
    /// compressed-tensors, marlin-24: stores only the weights that --sparse24 keeps; vLLM and
    /// compressed-tensors from 0.15 on do not read it.
    #[value(name = "marlin-24")]
    Marlin24,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MethodName {
    /// Round to nearest.
    Rtn,
    /// Scale inputs over --calibration, then round as --clip does.
    Awq,
    /// GPTQ over --calibration, block after block; with --sparse24 it prunes as SparseGPT does.
    Gptq,
    /// GPTQ with --sparse24.
    Sparsegpt,
}

#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// Hugging Face folder with float weights.
    pub dir: PathBuf,
    /// Folder to write; it must not exist, or be empty.
    pub out: PathBuf,
    /// Width of the values: 4 or 8.
    #[arg(long, default_value = "4", value_parser = clap::value_parser!(i64).try_map(Bits::try_from))]
    pub bits: Bits,
    /// Rows of K that share a scale: g32, g64, g128 or channel.
    #[arg(long, default_value = "g128")]
    pub group: GroupSize,
    /// Dtype of the scales: bf16 or f32 for weights that are too large or too small for f16 scales.
    #[arg(long, value_enum, default_value = "f16")]
    pub scales: DtypeName,
    /// Asymmetric: a zero point for each group.
    #[arg(long)]
    pub zero_points: bool,
    /// Keep two of every four weights (2:4); rtn keeps those of the largest magnitude.
    #[arg(long)]
    pub sparse24: bool,
    /// How values are chosen.
    #[arg(long, value_enum, default_value = "rtn")]
    pub method: MethodName,
    /// rtn: search the range of each group that leaves the least squared error.
    #[arg(long)]
    pub clip: bool,
    /// gptq: scale inputs first, as awq does.
    #[arg(long)]
    pub awq: bool,
    /// gptq, awq: text to calibrate on; `.jsonl` has a document in `text`, or a conversation in
    /// `messages`, on each line. May be given several times.
    #[arg(long, value_name = "FILE")]
    pub calibration: Vec<PathBuf>,
    /// gptq, awq: number of samples of the text.
    #[arg(long, default_value_t = SampleOptions::default().samples)]
    pub samples: usize,
    #[arg(long, help = format!("gptq, awq: tokens of the longest sample; without it {}, or the model's own limit if that is less", SampleOptions::default().max_len))]
    pub max_len: Option<usize>,
    /// gptq, awq: the seed that draws the samples.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// gptq: round the features with the largest inputs first, across groups; activations are then
    /// permuted at run time, which only readers of --format gptq support (GPTQModel, not vLLM).
    /// Without it, groups with large inputs come first, and within a group the largest inputs.
    #[arg(long)]
    pub act_order: bool,
    /// gptq: the fraction of the mean of a Hessian's diagonal that is added to the diagonal.
    #[arg(long, default_value_t = 0.01)]
    pub damping: f64,
    /// gptq, awq: the device to calibrate on; without it the best one present: cuda, vulkan, flex.
    #[arg(long)]
    pub device: Option<DeviceName>,
    /// gptq, awq: dtype of activations; without it the checkpoint's, where the device computes in
    /// it.
    #[arg(long)]
    pub dtype: Option<DtypeName>,
    /// Form of the files.
    #[arg(long, value_enum, default_value = "compressed-tensors")]
    pub format: FormatName,
    /// Layers to leave as they are: a name, or `re:` and a regular expression; the model must have
    /// such a layer. May be given several times.
    #[arg(long)]
    pub exclude: Vec<String>,
    /// Layers to quantise differently: a pattern as for --exclude, and `bits:8`, `group:g32`, both
    /// with a comma, or `skip`. May be given several times; the first pattern that matches a layer
    /// applies.
    #[arg(long = "override", value_name = "PATTERN=SETTINGS", value_parser = override_of)]
    pub overrides: Vec<(String, Override)>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Parses a pattern and the settings of its layers. Patterns may contain `=`, settings do not.
fn override_of(text: &str) -> Result<(String, Override), Box<dyn Error + Send + Sync>> {
    let (pattern, settings) = text
        .rsplit_once('=')
        .ok_or("there is no `=` between a pattern and its settings")?;
    Ok((pattern.into(), settings.parse()?))
}

#[derive(Debug, Args)]
pub struct EvaluateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Hugging Face folders of the models to compare with the first.
    #[arg(long = "with", value_name = "DIR")]
    pub with: Vec<PathBuf>,
    /// Text file, UTF-8. May be given several times: results are printed for each text, and for all
    /// texts together.
    #[arg(long, value_name = "FILE", required = true)]
    pub text: Vec<PathBuf>,
    #[command(flatten)]
    pub windows: WindowArgs,
    /// Draw perplexity against size: an `.svg` or `.png` file. May be given several times.
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(PlotFile::try_from))]
    pub plot: Vec<PlotFile>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 128)]
    pub max_new_tokens: usize,
    /// Sampling temperature; 0 takes the likeliest token. Without it, the model's own
    /// generation_config applies.
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Choose among this many of the likeliest tokens.
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Choose among the likeliest tokens that together have this probability.
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Choose among the tokens that are at least this many times as likely as the likeliest, 0 to
    /// 1.
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Divide the logits of tokens that already occurred; 1 leaves them unchanged.
    #[arg(long)]
    pub repetition_penalty: Option<f32>,
    /// Seed of the random choices.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text to continue.
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_file")]
    pub prompt: Option<String>,
    /// File with the text to continue, UTF-8, of any length; `-` is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_file: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Print JSON at the end instead of text as it is generated.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The system message, given to the model before the conversation.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// File with the system message, UTF-8, of any length.
    #[arg(long, value_name = "FILE", conflicts_with = "system")]
    pub system_file: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub struct PerplexityArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text file, UTF-8.
    #[arg(long)]
    pub text: PathBuf,
    #[command(flatten)]
    pub windows: WindowArgs,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids, separated by commas.
    #[arg(long, value_delimiter = ',', required = true)]
    pub ids: Vec<u32>,
}

#[derive(Debug, Args)]
pub struct KernelsArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Rows of activations to plan for: sequences of a decode step, or tokens of a prompt. May be
    /// given several times.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 512])]
    pub rows: Vec<usize>,
    /// Print a line for every layer; without it, equal layers share a line.
    #[arg(long)]
    pub all: bool,
    /// Print JSON, always with every layer.
    #[arg(long)]
    pub json: bool,
}
