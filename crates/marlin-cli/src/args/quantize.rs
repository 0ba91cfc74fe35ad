//! The arguments of `quantize`.

use super::{DtypeName, HubArgs};
use crate::device::DeviceName;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use marlin_format::{GroupSize, QuantSpec, WeightValue};
use marlin_lm::{Override, SampleOptions};
use std::error::Error;
use std::path::PathBuf;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum FormatName {
    /// compressed-tensors: the format of llm-compressor, which vLLM and transformers read;
    /// pack-quantized for integers.
    CompressedTensors,
    /// GPTQ, version 2: the format of GPTQModel.
    Gptq,
    /// compressed-tensors, marlin-24: stores only the weights that --sparse24 keeps; not supported
    /// by vLLM, nor by compressed-tensors from 0.15 on.
    #[value(name = "marlin-24")]
    Marlin24,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MethodName {
    /// Round to nearest.
    Rtn,
    /// AWQ with --calibration: scale inputs, then round as with --clip.
    Awq,
    /// GPTQ with --calibration, block by block; with --sparse24, prune as SparseGPT does.
    Gptq,
    /// GPTQ with --sparse24.
    Sparsegpt,
}

#[derive(Debug, Args)]
pub struct QuantizeArgs {
    /// Hugging Face folder with float weights, or name of a model on the hub.
    #[arg(value_name = "MODEL")]
    pub dir: PathBuf,
    /// Folder to write; must be empty or not exist.
    pub out: PathBuf,
    #[command(flatten)]
    pub hub: HubArgs,
    /// Width of the values: 4 or 8.
    #[arg(long, default_value = "4", value_parser = clap::value_parser!(i64).try_map(WeightValue::try_from))]
    pub bits: WeightValue,
    /// Rows of K that share a scale: g32, g64, g128 or channel.
    #[arg(long, default_value = "g128")]
    pub group: GroupSize,
    /// Quantise to floats, in place of integers of --bits in groups of --group: fp8 (e4m3, a scale
    /// for each output channel), fp8-w8a8 (the same, with activations that may be rounded to e4m3),
    /// mxfp4 (e2m1, groups of 32, scales that are powers of two) or nvfp4 (e2m1, groups of 16).
    #[arg(
        long,
        value_name = "FORMAT",
        value_parser = PossibleValuesParser::new(QuantSpec::FLOAT_FORMATS.map(|(name, _)| name)),
        conflicts_with_all = ["bits", "group", "scales", "zero_points", "sparse24"]
    )]
    pub format_values: Option<String>,
    /// Dtype of the scales; use bf16 or f32 for weights that are too large or too small for f16
    /// scales.
    #[arg(long, value_enum, default_value = "f16")]
    pub scales: DtypeName,
    /// Quantise asymmetrically, with a zero point for each group.
    #[arg(long)]
    pub zero_points: bool,
    /// Prune to 2:4, which keeps two of every four weights; rtn keeps the largest magnitudes.
    #[arg(long)]
    pub sparse24: bool,
    /// Quantisation method.
    #[arg(long, value_enum, default_value = "rtn")]
    pub method: MethodName,
    /// rtn: search for the range of each group with the least squared error.
    #[arg(long)]
    pub clip: bool,
    /// gptq: scale inputs first, as awq does.
    #[arg(long)]
    pub awq: bool,
    /// gptq, awq: text file to calibrate on; each line of a `.jsonl` file has a document in `text`,
    /// or a conversation in `messages`. May be given several times.
    #[arg(long, value_name = "FILE")]
    pub calibration: Vec<PathBuf>,
    /// gptq, awq: number of calibration samples.
    #[arg(long, default_value_t = SampleOptions::default().samples)]
    pub samples: usize,
    #[arg(long, help = format!("gptq, awq: tokens of the longest sample; without it {}, or the model's own limit if that is less", SampleOptions::default().max_len))]
    pub max_len: Option<usize>,
    /// gptq, awq: seed for drawing the samples.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// gptq: calibrate every expert of a mixture with all tokens. By default, an expert is
    /// calibrated with the tokens that the router sends to it, and rounded if there are fewer than
    /// 128.
    #[arg(long)]
    pub route_all: bool,
    /// gptq: act-order, which rounds the features with the largest inputs first, across groups.
    /// Activations are then permuted at run time, which only readers of --format gptq support
    /// (GPTQModel, not vLLM). By default, groups with large inputs come first, and within a group
    /// the largest inputs.
    #[arg(long)]
    pub act_order: bool,
    /// gptq: fraction of the mean of a Hessian's diagonal that is added to the diagonal.
    #[arg(long, default_value_t = 0.01)]
    pub damping: f64,
    /// gptq, awq: device to calibrate on; by default the first present of cuda, vulkan and flex.
    #[arg(long)]
    pub device: Option<DeviceName>,
    /// gptq, awq: dtype of activations; by default the checkpoint's dtype, if the device supports
    /// it.
    #[arg(long)]
    pub dtype: Option<DtypeName>,
    /// Format of the files.
    #[arg(long, value_enum, default_value = "compressed-tensors")]
    pub format: FormatName,
    /// Layers not to quantise: a name, or `re:` and a regular expression. The model must have such
    /// a layer. May be given several times.
    #[arg(long)]
    pub exclude: Vec<String>,
    /// Layers to quantise differently: a pattern as for --exclude; then `bits:8`, `group:g32`, both
    /// with a comma between, a format of --format-values, or `skip`. May be given several times;
    /// the first pattern that matches a layer applies.
    #[arg(long = "override", value_name = "PATTERN=SETTINGS", value_parser = override_of)]
    pub overrides: Vec<(String, Override)>,
    /// Round the output head, too, to 4 or 8 bits in groups of 128; without it the head stays
    /// float.
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(i64).try_map(WeightValue::try_from))]
    pub head: Option<WeightValue>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Parses a pattern and the settings of its layers, separated by the last `=`.
fn override_of(text: &str) -> Result<(String, Override), Box<dyn Error + Send + Sync>> {
    let (pattern, settings) = text
        .rsplit_once('=')
        .ok_or("there is no `=` between a pattern and its settings")?;
    Ok((pattern.into(), settings.parse()?))
}
