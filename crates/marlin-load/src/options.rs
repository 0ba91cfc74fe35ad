//! What a load test does.

use crate::error::LoadError;
use rand::RngExt;
use rand::rngs::StdRng;
use serde::Serialize;
use serde_json::{Map, Value};
use std::time::Duration;

/// The fields of a body that the generator sets.
const OWN_FIELDS: [&str; 8] = [
    "ignore_eos",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "prompt",
    "stream",
    "stream_options",
];

/// The options of a load test; [`LoadOptions::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// The server, such as `http://127.0.0.1:8000`, without the path of an endpoint.
    pub base_url: String,
    /// True if the server may be on another machine. Without it, load is sent to loopback addresses
    /// only: a load test of a server of others is an attack.
    pub allow_remote: bool,
    /// The key that is sent as `Authorization: Bearer KEY`.
    pub api_key: Option<String>,
    /// The name of the model; the first of `/v1/models` if there is none.
    pub model: Option<String>,
    /// The endpoint that generates.
    pub endpoint: Endpoint,
    /// The times at which requests are sent.
    pub load: Load,
    /// How many requests are sent.
    pub amount: Amount,
    /// What the prompts are made of. [`Endpoint::Chat`] has words only.
    pub prompt: PromptKind,
    /// The size of the vocabulary, for prompts of token IDs. If there is none, the IDs are those of
    /// a sample of text that `/tokenize` returns.
    pub vocab_size: Option<u32>,
    /// The number of tokens of a prompt, without the shared prefix. Of a prompt of words, it is the
    /// number of words; the report counts the tokens that the server counts.
    pub input_len: Length,
    /// The number of tokens (or words) that all prompts begin with.
    pub prefix_len: usize,
    /// The `max_tokens` of a request.
    pub output_len: Length,
    /// True if a server goes on to `max_tokens` past the end of the text.
    pub ignore_eos: bool,
    /// Fields added to the body of every request, such as `temperature`.
    pub extra_body: Map<String, Value>,
    /// The number of requests before the measurement, one after the other, beside the first that
    /// shows that the server answers.
    pub warmups: usize,
    /// The fraction of the requests that are cancelled: their connection is closed after a random
    /// number of tokens.
    pub cancel_fraction: f64,
    /// The bounds of a request that counts as good.
    pub slo: Slo,
    /// The longest time to connect.
    pub connect_timeout: Duration,
    /// The longest time of a request, from its start to its last byte.
    pub request_timeout: Duration,
    /// The number of threads of the generator.
    pub threads: usize,
    /// The seed of arrivals, lengths, prompts and cancels.
    pub seed: u64,
}

impl LoadOptions {
    /// Returns the options with a server: 1000 requests at once with prompts of 1024 tokens and 128
    /// tokens of output, as `vllm bench serve` has them.
    pub fn new(base_url: impl Into<String>) -> Self {
        Self {
            base_url: base_url.into(),
            allow_remote: false,
            api_key: None,
            model: None,
            endpoint: Endpoint::Completions,
            load: Load::default(),
            amount: Amount::Requests(1000),
            prompt: PromptKind::Auto,
            vocab_size: None,
            input_len: Length::fixed(1024),
            prefix_len: 0,
            output_len: Length::fixed(128),
            ignore_eos: false,
            extra_body: Map::new(),
            warmups: 0,
            cancel_fraction: 0.0,
            slo: Slo::default(),
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(600),
            threads: 2,
            seed: 0,
        }
    }

    /// Refuses options without a meaning, as [`run`](crate::run) does.
    ///
    /// # Errors
    ///
    /// [`LoadError::Option`] with the first of them.
    pub fn check(&self) -> Result<(), LoadError> {
        let refuse = |option, reason: String| Err(LoadError::Option { option, reason });
        if let Some(rate) = self.load.rate
            && !(rate > 0.0 && rate.is_finite())
        {
            return refuse("rate", format!("{rate} is not a positive number"));
        }
        let burstiness = self.load.burstiness;
        if burstiness.is_nan() || burstiness <= 0.0 {
            return refuse("burstiness", format!("{burstiness} is not positive"));
        }
        if self.load.concurrency == Some(0) {
            return refuse("concurrency", "no request could be sent".into());
        }
        match self.amount {
            Amount::Requests(0) => return refuse("amount", "there are no requests".into()),
            Amount::Duration(_) if self.load.rate.is_none() && self.load.concurrency.is_none() => {
                let reason = "a duration needs a rate or a concurrency, else requests have no end";
                return refuse("amount", reason.into());
            }
            _ => {}
        }
        for (option, length) in [
            ("input_len", self.input_len),
            ("output_len", self.output_len),
        ] {
            if length.min == 0 || length.min > length.max {
                return refuse(
                    option,
                    format!("{} to {} is no range from 1", length.min, length.max),
                );
            }
        }
        if !(0.0..=1.0).contains(&self.cancel_fraction) {
            let reason = format!("{} is not between 0 and 1", self.cancel_fraction);
            return refuse("cancel_fraction", reason);
        }
        if self.endpoint == Endpoint::Chat && self.prompt == PromptKind::TokenIds {
            return refuse("prompt", "/v1/chat/completions takes no token IDs".into());
        }
        if self.vocab_size == Some(0) {
            return refuse("vocab_size", "there are no tokens".into());
        }
        if let Some(field) = OWN_FIELDS
            .iter()
            .find(|field| self.extra_body.contains_key(**field))
        {
            return refuse(
                "extra_body",
                format!("`{field}` follows from the other options"),
            );
        }
        if self.threads == 0 {
            return refuse("threads", "nothing could run".into());
        }
        Ok(())
    }
}

/// The endpoint that generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`: the prompt is a message of the user.
    Chat,
}

impl Endpoint {
    /// Returns the path below the base URL.
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// The times at which requests are sent.
///
/// | `rate` | `concurrency` | |
/// |---|---|---|
/// | some | none | open loop: requests arrive whether others have ended or not |
/// | none | some | closed loop: as many requests as `concurrency` all the time |
/// | some | some | open loop, but an arrival waits until fewer requests than `concurrency` run |
/// | none | none | all requests at once |
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// The mean number of requests that arrive in a second.
    pub rate: Option<f64>,
    /// The shape of the gamma distribution of the time between two arrivals: 1 is a Poisson
    /// process, less comes in bursts, more is steadier, infinity is constant.
    pub burstiness: f64,
    /// The most requests at a time.
    pub concurrency: Option<usize>,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            rate: None,
            burstiness: 1.0,
            concurrency: None,
        }
    }
}

/// How many requests are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// A number of requests. At a rate, the arrivals are scaled to end at number / rate seconds, so
    /// that runs with different seeds offer the same load.
    Requests(usize),
    /// Those that arrive in a time. The run ends with the last of them.
    Duration(Duration),
}

/// What prompts are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptKind {
    /// Random token IDs if the server takes them, otherwise random words.
    Auto,
    /// Random token IDs.
    TokenIds,
    /// Random words.
    Words,
}

/// A number of tokens, drawn evenly from `min` to `max`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Length {
    /// The least, at least 1.
    pub min: usize,
    /// The most.
    pub max: usize,
}

impl Length {
    /// Returns a length that is always the same.
    pub fn fixed(len: usize) -> Self {
        Self { min: len, max: len }
    }

    pub(crate) fn draw(self, rng: &mut StdRng) -> usize {
        rng.random_range(self.min..=self.max)
    }
}

/// The bounds of a good request: goodput counts the requests that keep all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Slo {
    /// The longest time to the first token.
    pub ttft: Option<Duration>,
    /// The longest mean time per output token after the first.
    pub tpot: Option<Duration>,
    /// The longest end-to-end latency.
    pub e2el: Option<Duration>,
}

impl Slo {
    /// Returns whether there are bounds.
    pub fn is_some(&self) -> bool {
        *self != Self::default()
    }
}
