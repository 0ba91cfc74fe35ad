//! The arguments of `bench-serve`.

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use marlin_load::Length;
use serde_json::{Map, Value};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct BenchServeArgs {
    /// Server with OpenAI's API, without the path of an endpoint.
    #[arg(value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Requests that arrive in a second, whether others have ended or not; `inf` sends all at once,
    /// or as many at a time as --concurrency says. Several rates, with commas between, are measured
    /// one after the other.
    #[arg(
        long,
        value_name = "RATES",
        value_delimiter = ',',
        default_value = "inf"
    )]
    pub rate: Vec<f64>,
    /// Let requests arrive as a Poisson process: --burstiness 1, the default.
    #[arg(long, conflicts_with = "burstiness")]
    pub poisson: bool,
    /// Shape of the gamma distribution of the time between two arrivals: 1 is a Poisson process,
    /// less comes in bursts, more is steadier, `inf` is constant.
    #[arg(long, default_value_t = 1.0)]
    pub burstiness: f64,
    /// Requests at a time. At a rate, those that arrive beyond it wait.
    #[arg(long, value_name = "REQUESTS")]
    pub concurrency: Option<usize>,
    /// Requests at each rate.
    #[arg(long, default_value_t = 1000)]
    pub requests: usize,
    /// Seconds in which requests are sent, in place of --requests; the run ends with the last of
    /// them.
    #[arg(long, value_name = "SECONDS", conflicts_with = "requests")]
    pub duration: Option<f64>,
    /// Tokens of a prompt, without --prefix-len: a number, or a range such as 32:96, from which
    /// they are drawn. Prompts are random token IDs; where the server takes none, they are as many
    /// random words.
    #[arg(long, value_name = "TOKENS", default_value = "1024", value_parser = length)]
    pub input_len: Length,
    /// Tokens of an answer at most, as for --input-len.
    #[arg(long, value_name = "TOKENS", default_value = "128", value_parser = length)]
    pub output_len: Length,
    /// Tokens that all prompts begin with.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub prefix_len: usize,
    /// Endpoint that generates.
    #[arg(long, value_enum, default_value = "completions")]
    pub endpoint: EndpointName,
    /// Name of the model; by default the first that the server lists.
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Key of the server, sent as `Authorization: Bearer KEY`.
    #[arg(
        long,
        value_name = "KEY",
        env = "BURN_MARLIN_API_KEY",
        hide_env_values = true,
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub api_key: Option<String>,
    /// Let answers go on to --output-len past the end of the text.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Part of the requests that are cancelled, from 0 to 1: their connection is closed after a
    /// random number of tokens.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.0)]
    pub cancel: f64,
    /// Requests before the measurement, one after the other, beside the first that shows that the
    /// server answers.
    #[arg(long, value_name = "REQUESTS", default_value_t = 0)]
    pub warmups: usize,
    /// Longest time to the first token of a good request. The goodput counts the requests that keep
    /// all bounds.
    #[arg(long, value_name = "MILLISECONDS")]
    pub slo_ttft: Option<f64>,
    /// Longest mean time per output token after the first of a good request.
    #[arg(long, value_name = "MILLISECONDS")]
    pub slo_tpot: Option<f64>,
    /// Longest end-to-end latency of a good request.
    #[arg(long, value_name = "MILLISECONDS")]
    pub slo_e2el: Option<f64>,
    /// Seed of arrivals, lengths, prompts and cancels.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Fields added to every request, as a JSON object such as '{"temperature": 0}'.
    #[arg(long, value_name = "JSON", value_parser = object)]
    pub extra_body: Option<Map<String, Value>>,
    /// Write the figures with every request as JSON, under the names of `vllm bench serve`; of
    /// several rates, an array.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Plot the distributions of times, or of several rates the times against the rate, as SVG.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Figures of earlier runs at several rates, written by --json or by `vllm bench serve`, whose
    /// lines are plotted beside this one under the name of their model. May be given several times.
    #[arg(long, value_name = "FILE", requires = "svg")]
    pub compare: Vec<PathBuf>,
    /// Send load to a server on another machine. Without it, only loopback addresses are allowed: a
    /// load test of a server of others is an attack.
    #[arg(long)]
    pub allow_remote: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum EndpointName {
    /// /v1/completions.
    Completions,
    /// /v1/chat/completions: the prompt is a message of the user.
    Chat,
}

/// Parses a number or a range of tokens.
fn length(text: &str) -> Result<Length, String> {
    let (min, max) = text.split_once(':').unwrap_or((text, text));
    match (min.parse(), max.parse()) {
        (Ok(min), Ok(max)) => Ok(Length { min, max }),
        _ => Err("it must be a number such as 64, or a range such as 32:96".into()),
    }
}

/// Parses an object of JSON.
fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("it must be an object of JSON: {error}"))
}
