//! The commands, one module each.

pub mod advise;
#[cfg(feature = "serve")]
pub mod bench_serve;
pub mod chat;
pub mod doctor;
pub mod evaluate;
pub mod generate;
pub mod inspect;
pub mod kernels;
pub mod logits;
pub mod perplexity;
pub mod quantize;
#[cfg(feature = "serve")]
pub mod serve;

use crate::args::{DtypeName, HubArgs, ModelArgs, SamplingArgs};
use crate::device;
use crate::error::CliError;
use crate::hub;
use crate::progress::Progress;
use burn::tensor::FloatDType;
use marlin_format::{GroupSize, QuantSpec};
use marlin_lm::{GenerateOptions, LanguageModel, ModelError, OpenOptions};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Opens the model of a command.
fn open(args: &ModelArgs, with_tokenizer: bool) -> Result<LanguageModel, CliError> {
    let (_, llama) = open_model(&args.dir, &args.hub, args, with_tokenizer)?;
    Ok(llama)
}

/// Opens a model, given by its folder or its name, with the options of a command's model. Returns
/// its folder, too.
fn open_model(
    model: &Path,
    hub: &HubArgs,
    args: &ModelArgs,
    with_tokenizer: bool,
) -> Result<(PathBuf, LanguageModel), CliError> {
    // Before a download.
    let devices = device::open_all(args.device, args.tensor_parallel)?;
    let dir = hub::folder(model, hub)?;
    let dtype = args.dtype.map(dtype);
    let head = args
        .head
        .map(|value| QuantSpec::new(value, GroupSize::G128));
    let options = OpenOptions {
        dtype,
        max_len: args.max_len,
        with_tokenizer,
        head,
        fp8_activations: !args.no_fp8_activations,
        ..OpenOptions::default()
    };
    let mut shown = Progress::of_bytes("read");
    let llama = LanguageModel::open_on(&dir, &devices, &options, |progress| {
        shown.set(progress.done, progress.total, progress.layer);
    });
    shown.finish();
    Ok((dir, llama?))
}

fn dtype(name: DtypeName) -> FloatDType {
    match name {
        DtypeName::F16 => FloatDType::F16,
        DtypeName::Bf16 => FloatDType::BF16,
        DtypeName::F32 => FloatDType::F32,
    }
}

/// Reads a UTF-8 text file.
fn read_text(path: &Path) -> Result<String, CliError> {
    let file = File::open(path).map_err(|source| CliError::File {
        path: path.into(),
        source,
    })?;
    read_text_from(file, path)
}

/// Reads the rest of a UTF-8 text file; errors name `path`.
fn read_text_from(mut file: impl Read, path: &Path) -> Result<String, CliError> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)
        .map_err(|source| CliError::File {
            path: path.into(),
            source,
        })?;
    String::from_utf8(bytes).map_err(|_| CliError::NotUtf8 { path: path.into() })
}

/// Encodes a text file and returns its first tokens, `max` at most.
fn text_tokens(
    llama: &LanguageModel,
    path: &Path,
    max: Option<usize>,
) -> Result<Vec<u32>, CliError> {
    let mut tokens = llama.tokenizer()?.encode(&read_text(path)?)?;
    tokens.truncate(max.unwrap_or(usize::MAX));
    // This error names the file, unlike the library's error.
    match tokens.len() {
        tokens @ 0..2 => Err(CliError::ShortText {
            path: path.into(),
            source: Box::new(ModelError::TextTooShort { tokens }),
        }),
        _ => Ok(tokens),
    }
}

/// Returns the sampling options of the command line. Options that are not given have the model's
/// own defaults.
fn generate_options(llama: &LanguageModel, args: &SamplingArgs) -> GenerateOptions {
    let mut options = llama.default_options(args.max_new_tokens);
    options.seed = args.seed;
    let sampling = &mut options.sampling;
    sampling.temperature = args.temperature.unwrap_or(sampling.temperature);
    sampling.top_k = args.top_k.or(sampling.top_k);
    sampling.top_p = args.top_p.unwrap_or(sampling.top_p);
    sampling.min_p = args.min_p.unwrap_or(sampling.min_p);
    sampling.repetition_penalty = args
        .repetition_penalty
        .unwrap_or(sampling.repetition_penalty);
    sampling.presence_penalty = args.presence_penalty.unwrap_or(sampling.presence_penalty);
    sampling.frequency_penalty = args.frequency_penalty.unwrap_or(sampling.frequency_penalty);
    options
}

/// Returns the number of tokens per second.
fn rate(tokens: usize, duration: std::time::Duration) -> f64 {
    tokens as f64 / duration.as_secs_f64().max(1e-9)
}
