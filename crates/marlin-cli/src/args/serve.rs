//! The arguments of `serve`.

use super::ModelArgs;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use marlin_lm::{CacheFormat, MAX_SEQUENCES, Pages};
use marlin_serve::model::ModelOptions;
use std::net::IpAddr;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Address to listen on. Other machines can reach the server on any other than 127.0.0.1 and
    /// ::1; it should have a key then.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one, which is in the first line of the log.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Key that clients send, as `Authorization: Bearer KEY` or `x-api-key: KEY`. May be given
    /// several times; without one every client may ask.
    #[arg(
        long,
        value_name = "KEY",
        env = "BURN_MARLIN_API_KEY",
        hide_env_values = true,
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub api_key: Vec<String>,
    /// Name under which clients ask for the model; by default the name of its folder, or its name
    /// on the hub. May be given several times.
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// Sequences that run at once.
    #[arg(long, default_value_t = ModelOptions::default().max_sequences as u16, value_parser = clap::value_parser!(u16).range(1..=MAX_SEQUENCES as i64))]
    pub max_sequences: u16,
    /// Requests that wait for others to end; further ones are answered with 429.
    #[arg(long, default_value_t = ModelOptions::default().max_waiting)]
    pub max_waiting: usize,
    /// Tokens of a step, prompts and decode together; by default as many as one pass over the
    /// weights computes.
    #[arg(long, value_name = "TOKENS")]
    pub max_step_tokens: Option<usize>,
    #[arg(
        long,
        default_value_t = ModelOptions::default().page_size,
        help = format!("Positions of a page of the KV cache: a power of two, at least {}", Pages::MIN_SIZE)
    )]
    pub page_size: usize,
    /// Format of the KV cache.
    #[arg(long, value_enum, default_value_t = KvCacheDtype::Auto)]
    pub kv_cache_dtype: KvCacheDtype,
    /// Pages of the KV cache; by default as many as fit --memory-fraction, and on the CPU those of
    /// 8 sequences of the model's window, in 4 GiB at most.
    #[arg(long)]
    pub pages: Option<u32>,
    /// Part of the device's free memory that the KV cache takes at most.
    #[arg(long, value_name = "FRACTION", default_value_t = ModelOptions::default().memory_fraction, value_parser = fraction)]
    pub memory_fraction: f64,
    /// Share out service evenly among the API keys, instead of first come, first served.
    #[arg(long)]
    pub fair: bool,
    /// Seconds that a request may wait for others to end.
    #[arg(long, value_name = "SECONDS")]
    pub queue_timeout: Option<u64>,
    /// Seconds that a request may take.
    #[arg(long, value_name = "SECONDS")]
    pub request_timeout: Option<u64>,
    /// Seconds that requests in progress may take after the server was told to end, by SIGINT or
    /// SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub drain_timeout: u64,
    /// Origin whose pages may ask, such as https://example.com; `*` is every origin. May be given
    /// several times.
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    /// Chain of certificates for TLS, PEM.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_certificate: Option<PathBuf>,
    /// Key of the first certificate, PEM.
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// Write logs as JSON, one object a line.
    #[arg(long)]
    pub json_logs: bool,
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(fraction) if fraction > 0.0 && fraction <= 1.0 => Ok(fraction),
        _ => Err("it must be above 0 and at most 1".into()),
    }
}

/// A format of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvCacheDtype {
    /// The dtype of the activations.
    Auto,
    /// e4m3 with a scale for each position of a head, nearly twice as many positions: CUDA,
    /// compute capability 8.0, f16 or bf16.
    Fp8,
}

impl From<KvCacheDtype> for CacheFormat {
    fn from(dtype: KvCacheDtype) -> Self {
        match dtype {
            KvCacheDtype::Auto => Self::Activations,
            KvCacheDtype::Fp8 => Self::E4m3,
        }
    }
}
