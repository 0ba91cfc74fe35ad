//! The command line.

#[cfg(feature = "serve")]
mod bench_serve;
mod quantize;
#[cfg(feature = "serve")]
mod serve;

#[cfg(feature = "serve")]
pub use self::bench_serve::{BenchServeArgs, EndpointName};
pub use self::quantize::{FormatName, MethodName, QuantizeArgs};
#[cfg(feature = "serve")]
pub use self::serve::ServeArgs;

use crate::advise::cards::CardSpec;
use crate::device::DeviceName;
use crate::plot::PlotFile;
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use marlin_format::WeightValue;
use marlin_lm::{MAX_SEQUENCES, OpenOptions};
use std::path::PathBuf;

/// Inspect checkpoints of language models, quantise them to 4 or 8 bits, run and serve them.
///
/// A model is a Hugging Face folder, or a name on the Hugging Face hub; what is missing of it in
/// the hub's cache is downloaded. HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE
/// apply.
///
/// Logs go to standard error; set `RUST_LOG=debug` to show the kernel of every layer. Compiled
/// kernels are kept in `burn-marlin` in the user's cache folder; set `BURN_MARLIN_CACHE` to another
/// folder, or to `off`.
#[derive(Debug, Parser)]
#[command(name = "burn-marlin", version)]
pub struct Cli {
    /// Report no progress. Without it, progress goes to standard error: a bar if that is a
    /// terminal, lines if it is not.
    #[arg(long, global = true)]
    pub quiet: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the tensors and quantised layers of a checkpoint with format, size, bits per weight and
    /// kernel, and report faults.
    Inspect(InspectArgs),
    /// Quantise a float checkpoint to 4 or 8 bits, to a new folder that other engines can also load
    /// (compressed-tensors or GPTQ).
    Quantize(QuantizeArgs),
    /// Generate text that continues a prompt.
    Generate(GenerateArgs),
    /// Chat with a model, one line per turn, in the format of its chat template.
    Chat(ChatArgs),
    /// Serve a model over HTTP, with the APIs of OpenAI and Anthropic: many requests at once, over
    /// a KV cache of pages that shares the prefixes of prompts.
    #[cfg(feature = "serve")]
    Serve(ServeArgs),
    /// Measure a server with OpenAI's API under load: throughput, time to the first token and per
    /// output token, with the figures of `vllm bench serve`.
    #[cfg(feature = "serve")]
    BenchServe(BenchServeArgs),
    /// Measure the perplexity of a model on a text.
    Perplexity(PerplexityArgs),
    /// Compare quantised models with the original: perplexity, and divergence and agreement of
    /// next-token predictions.
    Evaluate(EvaluateArgs),
    /// Print the logits after a sequence of tokens as JSON, to compare with another implementation.
    Logits(LogitsArgs),
    /// List the kernel that runs each layer, and the reason for the choice.
    Kernels(KernelsArgs),
    /// Tell which formats a model can have on a card: sizes, tokens per second, time to the first
    /// token and accuracy, each measured or modelled. Only sizes are read of the folder's weights.
    Advise(AdviseArgs),
    /// Check this machine and, if one is given, a checkpoint: versions, devices, drivers, NVRTC
    /// and caches, and the command that installs what is missing.
    Doctor(DoctorArgs),
}

/// Options for models that are given by their name on the Hugging Face hub.
#[derive(Debug, Args)]
pub struct HubArgs {
    /// Branch, tag or commit of a model that is given by its name; by default main.
    #[cfg(feature = "hub")]
    #[arg(long)]
    pub revision: Option<String>,
    /// Do not use the network: a model that is given by its name must be in the cache.
    #[cfg(feature = "hub")]
    #[arg(long)]
    pub offline: bool,
}

impl HubArgs {
    /// Returns the options for a model of which the command line has no revision.
    pub fn without_revision(&self) -> Self {
        Self {
            #[cfg(feature = "hub")]
            revision: None,
            #[cfg(feature = "hub")]
            offline: self.offline,
        }
    }
}

/// A checkpoint and the device that it runs on.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Hugging Face folder, or name of a model on the hub, such as Qwen/Qwen3-8B-AWQ.
    #[arg(value_name = "MODEL")]
    pub dir: PathBuf,
    #[command(flatten)]
    pub hub: HubArgs,
    /// Device to run on; by default the first present of cuda, vulkan and flex.
    #[arg(long)]
    pub device: Option<DeviceName>,
    /// Dtype of activations; by default the checkpoint's dtype, if the device supports it.
    #[arg(long)]
    pub dtype: Option<DtypeName>,
    #[arg(long, help = format!("Positions of the cache; without it {}, or the model's own limit if that is less", OpenOptions::DEFAULT_MAX_LEN))]
    pub max_len: Option<usize>,
    /// Round a float output head to 4 or 8 bits, groups of 128; without it the head stays as it is.
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(i64).try_map(WeightValue::try_from))]
    pub head: Option<WeightValue>,
    /// Keep activations in their dtype where the checkpoint declares that they are rounded to FP8.
    #[arg(long)]
    pub no_fp8_activations: bool,
    /// Split the model over this many devices: the first cards of the chosen kind, or threads of
    /// the CPU.
    #[arg(long, value_name = "DEVICES", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=256).map(|number| number as usize))]
    pub tensor_parallel: usize,
}

/// The part of a text that models are measured on.
#[derive(Debug, Args)]
pub struct WindowArgs {
    /// Tokens per window; windows do not overlap.
    #[arg(long, default_value_t = 512)]
    pub window: usize,
    /// Use only this many tokens from the start of each text.
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
    /// Hugging Face folder, or name of a model on the hub.
    #[arg(value_name = "MODEL")]
    pub dir: PathBuf,
    #[command(flatten)]
    pub hub: HubArgs,
    /// Device to choose kernels for; by default the first present of cuda, vulkan and flex.
    #[arg(long)]
    pub device: Option<DeviceName>,
    /// Print a line for every tensor and layer; by default, equal tensors and layers of consecutive
    /// blocks share a line.
    #[arg(long)]
    pub all: bool,
    /// Print JSON, always with every tensor and layer.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct EvaluateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Hugging Face folder, or name on the hub, of a model to compare with the first. May be given
    /// several times; --revision is that of the first model.
    #[arg(long = "with", value_name = "MODEL")]
    pub with: Vec<PathBuf>,
    /// Text file, UTF-8. May be given several times; results are printed for each text, and for all
    /// texts together.
    #[arg(long, value_name = "FILE", required = true)]
    pub text: Vec<PathBuf>,
    #[command(flatten)]
    pub windows: WindowArgs,
    /// Plot perplexity against size to an `.svg` or `.png` file. May be given several times.
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(PlotFile::try_from))]
    pub plot: Vec<PlotFile>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Largest number of tokens to generate.
    #[arg(long, default_value_t = 128)]
    pub max_new_tokens: usize,
    /// Sampling temperature; 0 always takes the most likely token. By default, the model's own
    /// generation_config applies.
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Choose among this many of the most likely tokens.
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Choose among the most likely tokens that together have this probability.
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Choose among the tokens with at least this fraction, 0 to 1, of the most likely token's
    /// probability.
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Penalty on tokens that already occurred: divides positive logits and multiplies negative
    /// ones; 1 is no penalty.
    #[arg(long)]
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that were generated before.
    #[arg(long, allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtracted from the logit of a token for each time that it was generated before.
    #[arg(long, allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
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
    /// System message, given to the model before the conversation.
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
    /// Numbers of activation rows to list kernels for: sequences of a decode step, or tokens of a
    /// prompt. May be given several times.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 512])]
    pub rows: Vec<usize>,
    /// Print a line for every layer; by default, equal layers share a line.
    #[arg(long)]
    pub all: bool,
    /// Print JSON, always with every layer.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct AdviseArgs {
    /// Hugging Face folder, of which `config.json` is enough, or name of a model on the hub; no
    /// weights are downloaded.
    #[arg(value_name = "MODEL")]
    pub dir: PathBuf,
    #[command(flatten)]
    pub hub: HubArgs,
    /// Device whose card to use; by default the first present.
    #[arg(long, conflicts_with = "card")]
    pub device: Option<DeviceName>,
    /// Card that need not be present, for example h100-80gb or rtx-4090; a name that is not known
    /// lists all.
    #[arg(long, value_name = "NAME")]
    pub card: Option<CardSpec>,
    /// Numbers of sequences that decode together. May be given several times.
    #[arg(long, value_delimiter = ',', default_values = ["1", "8", "64"], value_parser = clap::value_parser!(u64).range(1..=MAX_SEQUENCES as u64).map(|number| number as usize))]
    pub batch: Vec<usize>,
    /// Tokens of each prompt; decode is that of the 64 tokens after it.
    #[arg(long, value_name = "TOKENS", default_value = "64", value_parser = clap::value_parser!(u64).range(1..).map(|number| number as usize))]
    pub prompt: usize,
    #[arg(long, help = format!("Positions of the cache of each sequence; without it {}, or the model's own limit if that is less", OpenOptions::DEFAULT_MAX_LEN))]
    pub max_len: Option<usize>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Hugging Face folder, or name of a model on the hub, to check as well: config, tokenizer,
    /// chat template, and the shape and data of every tensor.
    #[arg(value_name = "MODEL")]
    pub dir: Option<PathBuf>,
    #[command(flatten)]
    pub hub: HubArgs,
    /// Device that the folder must fit on; by default the first of cuda, vulkan and flex that is
    /// present and has no error.
    #[arg(long, requires = "dir")]
    pub device: Option<DeviceName>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}
