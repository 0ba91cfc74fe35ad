//! The result of a load test, as text, JSON and a plot.

use crate::error::LoadError;
use crate::metrics::{Metrics, Summary};
use crate::options::{Endpoint, Length, Load};
use crate::plot;
use crate::record::RequestRecord;
use serde_json::{Map, Value, json};
use std::fmt;
use std::time::Duration;

/// The width of the table.
const WIDTH: usize = 50;

/// The result of a load test. `Display` is the table of `vllm bench serve`.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadReport {
    /// The server.
    pub base_url: String,
    /// The model, as the server names it.
    pub model: String,
    /// The endpoint.
    pub endpoint: Endpoint,
    /// The times at which requests were sent.
    pub load: Load,
    /// The tokens of a prompt without the shared prefix.
    pub input_len: Length,
    /// The tokens of the shared prefix.
    pub prefix_len: usize,
    /// The `max_tokens` of a request.
    pub output_len: Length,
    /// True if the prompts were token IDs, false if they were words.
    pub token_ids: bool,
    /// The seed.
    pub seed: u64,
    /// The time from the start of the run to the end of the last request.
    pub duration: Duration,
    /// The figures.
    pub metrics: Metrics,
    /// The requests in the order of their numbers.
    pub requests: Vec<RequestRecord>,
}

impl LoadReport {
    /// Returns the report as JSON, with the keys of `vllm bench serve` for the figures, and every
    /// request under `requests`. Keys with `_ms` are in milliseconds, all other times in seconds.
    pub fn to_json(&self) -> Value {
        let metrics = &self.metrics;
        let mut map = Map::new();
        let entries = [
            ("base_url", json!(self.base_url)),
            ("model_id", json!(self.model)),
            ("endpoint", json!(self.endpoint)),
            ("request_rate", json!(self.load.rate)),
            ("burstiness", json!(self.load.burstiness)),
            ("max_concurrency", json!(self.load.concurrency)),
            ("input_len", json!(self.input_len)),
            ("prefix_len", json!(self.prefix_len)),
            ("output_len", json!(self.output_len)),
            ("token_ids", json!(self.token_ids)),
            ("seed", json!(self.seed)),
            ("duration", json!(self.duration.as_secs_f64())),
            ("completed", json!(metrics.completed)),
            ("failed", json!(metrics.failed)),
            ("cancelled", json!(metrics.cancelled)),
            ("failures", json!(metrics.failures)),
            ("total_input_tokens", json!(metrics.input_tokens)),
            ("total_output_tokens", json!(metrics.output_tokens)),
            ("request_throughput", json!(metrics.request_throughput)),
            ("request_goodput", json!(metrics.request_goodput)),
            ("output_throughput", json!(metrics.output_throughput)),
            ("total_token_throughput", json!(metrics.total_throughput)),
            (
                "max_output_tokens_per_s",
                json!(metrics.peak_output_throughput),
            ),
            ("max_concurrent_requests", json!(metrics.peak_concurrency)),
        ];
        map.extend(entries.map(|(name, value)| (name.to_string(), value)));
        let times = [
            ("ttft", &metrics.ttft),
            ("tpot", &metrics.tpot),
            ("itl", &metrics.itl),
            ("e2el", &metrics.e2el),
            ("send_delay", &metrics.send_delay),
        ];
        for (name, summary) in times {
            for (statistic, seconds) in statistics(summary) {
                let statistic = statistic.to_lowercase();
                map.insert(format!("{statistic}_{name}_ms"), json!(seconds * 1e3));
            }
            map.insert(format!("std_{name}_ms"), json!(summary.std * 1e3));
        }
        map.insert("requests".into(), json!(self.requests));
        Value::Object(map)
    }

    /// Returns an SVG with the distributions of TTFT, TPOT, ITL and E2EL.
    ///
    /// # Errors
    ///
    /// If the plot cannot be drawn.
    pub fn to_svg(&self) -> Result<String, LoadError> {
        plot::distributions(&self.requests)
    }
}

fn statistics(summary: &Summary) -> [(&'static str, f64); 4] {
    [
        ("Mean", summary.mean),
        ("Median", summary.median),
        ("P90", summary.p90),
        ("P99", summary.p99),
    ]
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let metrics = &self.metrics;
        let title = |f: &mut fmt::Formatter<'_>, text: &str, fill: char| {
            let left = (WIDTH - text.len()) / 2;
            let bar = |len| fill.to_string().repeat(len);
            writeln!(f, "{}{text}{}", bar(left), bar(WIDTH - text.len() - left))
        };
        title(f, " Serving Benchmark Result ", '=')?;
        let line =
            |f: &mut fmt::Formatter<'_>, name: &str, value: &str| writeln!(f, "{name:<40} {value}");
        line(f, "Successful requests:", &metrics.completed.to_string())?;
        line(f, "Failed requests:", &metrics.failed.to_string())?;
        for (kind, count) in &metrics.failures {
            line(f, &format!("  {kind}:"), &count.to_string())?;
        }
        if metrics.cancelled > 0 {
            line(f, "Cancelled requests:", &metrics.cancelled.to_string())?;
        }
        if let Some(concurrency) = self.load.concurrency {
            line(f, "Maximum request concurrency:", &concurrency.to_string())?;
        }
        if let Some(rate) = self.load.rate {
            line(f, "Request rate configured (RPS):", &format!("{rate:.2}"))?;
        }
        let number = |value: f64| format!("{value:.2}");
        line(
            f,
            "Benchmark duration (s):",
            &number(self.duration.as_secs_f64()),
        )?;
        line(f, "Total input tokens:", &metrics.input_tokens.to_string())?;
        line(
            f,
            "Total generated tokens:",
            &metrics.output_tokens.to_string(),
        )?;
        line(
            f,
            "Request throughput (req/s):",
            &number(metrics.request_throughput),
        )?;
        if let Some(goodput) = metrics.request_goodput {
            line(f, "Request goodput (req/s):", &number(goodput))?;
        }
        line(
            f,
            "Output token throughput (tok/s):",
            &number(metrics.output_throughput),
        )?;
        let peak = number(metrics.peak_output_throughput);
        line(f, "Peak output token throughput (tok/s):", &peak)?;
        line(
            f,
            "Peak concurrent requests:",
            &metrics.peak_concurrency.to_string(),
        )?;
        line(
            f,
            "Total token throughput (tok/s):",
            &number(metrics.total_throughput),
        )?;
        let times = [
            ("Time to First Token", "TTFT", &metrics.ttft),
            (
                "Time per Output Token (excl. 1st token)",
                "TPOT",
                &metrics.tpot,
            ),
            ("Inter-token Latency", "ITL", &metrics.itl),
            ("End-to-end Latency", "E2EL", &metrics.e2el),
            (
                "Delay of the Load Generator",
                "send delay",
                &metrics.send_delay,
            ),
        ];
        for (heading, name, summary) in times {
            title(f, heading, '-')?;
            for (statistic, seconds) in statistics(summary) {
                line(
                    f,
                    &format!("{statistic} {name} (ms):"),
                    &number(seconds * 1e3),
                )?;
            }
        }
        f.write_str(&"=".repeat(WIDTH))
    }
}
