//! The figures of `vllm bench serve`, from the records of requests.
//!
//! | figure | of the completed requests |
//! |---|---|
//! | TTFT | the time to the first token |
//! | TPOT | (E2EL - TTFT) / (output tokens - 1) of each request with two tokens or more |
//! | ITL | every time between two events with tokens, of all requests together |
//! | E2EL | the time to the last event with a choice |
//!
//! Throughputs are by the duration from the start of the run to the end of its last request. Two
//! definitions are stricter than vLLM's: a stream that ends before `[DONE]` is a failure, and an
//! event that ends an answer without a text has no inter-token latency.

use crate::options::Slo;
use crate::record::{Outcome, RequestRecord};
use std::collections::BTreeMap;
use std::time::Duration;

/// The figures of a load test.
#[derive(Debug, Clone, PartialEq)]
pub struct Metrics {
    /// The requests that were completed.
    pub completed: usize,
    /// The requests that failed.
    pub failed: usize,
    /// The requests that the generator cancelled.
    pub cancelled: usize,
    /// The number of failures of each kind.
    pub failures: BTreeMap<String, usize>,
    /// The tokens of the prompts of the completed requests.
    pub input_tokens: usize,
    /// The tokens of the answers of the completed requests.
    pub output_tokens: usize,
    /// Completed requests a second.
    pub request_throughput: f64,
    /// Completed requests a second that kept all bounds; none without bounds.
    pub request_goodput: Option<f64>,
    /// Output tokens a second.
    pub output_throughput: f64,
    /// Input and output tokens a second.
    pub total_throughput: f64,
    /// The most events with tokens in a second, counted from the start of the first request.
    pub peak_output_throughput: f64,
    /// The most completed requests at the same time.
    pub peak_concurrency: usize,
    /// The time to the first token.
    pub ttft: Summary,
    /// The time per output token after the first.
    pub tpot: Summary,
    /// The inter-token latency.
    pub itl: Summary,
    /// The end-to-end latency.
    pub e2el: Summary,
    /// How late the generator sent requests: large values mean that it was the bottleneck.
    pub send_delay: Summary,
}

/// Statistics of times in seconds; zero if there are none.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Summary {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub median: f64,
    /// The standard deviation of the population.
    pub std: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 99th percentile.
    pub p99: f64,
}

impl Summary {
    /// Returns the statistics of times. Percentiles are interpolated, as NumPy does.
    pub fn of(mut times: Vec<f64>) -> Self {
        if times.is_empty() {
            return Self::default();
        }
        times.sort_by(f64::total_cmp);
        let count = times.len() as f64;
        let mean = times.iter().sum::<f64>() / count;
        let squares = times.iter().map(|time| (time - mean).powi(2)).sum::<f64>();
        Self {
            mean,
            median: percentile(&times, 50.0),
            std: (squares / count).sqrt(),
            p90: percentile(&times, 90.0),
            p99: percentile(&times, 99.0),
        }
    }
}

/// Returns a percentile of times in ascending order, of which there is at least one.
fn percentile(sorted: &[f64], percent: f64) -> f64 {
    let position = percent / 100.0 * (sorted.len() - 1) as f64;
    let below = position.floor() as usize;
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (position - below as f64) * (sorted[above] - sorted[below])
}

impl Metrics {
    /// Returns the figures of a run.
    pub fn of(requests: &[RequestRecord], duration: Duration, slo: &Slo) -> Self {
        let completed: Vec<&RequestRecord> = (requests.iter())
            .filter(|request| request.outcome == Outcome::Completed)
            .collect();
        let mut failures = BTreeMap::new();
        for request in requests {
            if let Outcome::Failed(failure) = &request.outcome {
                *failures.entry(failure.kind()).or_insert(0) += 1;
            }
        }
        let failed = failures.values().sum();
        let input_tokens = completed.iter().map(|request| request.input_tokens).sum();
        let output_tokens = completed.iter().map(|request| request.output_tokens).sum();
        let seconds = duration.as_secs_f64();
        let good = completed
            .iter()
            .filter(|request| is_good(request, slo))
            .count();
        let times = |time: fn(&RequestRecord) -> Option<f64>| {
            Summary::of(
                completed
                    .iter()
                    .filter_map(|request| time(request))
                    .collect(),
            )
        };
        Self {
            completed: completed.len(),
            failed,
            cancelled: requests.len() - completed.len() - failed,
            failures,
            input_tokens,
            output_tokens,
            request_throughput: completed.len() as f64 / seconds,
            request_goodput: slo.is_some().then(|| good as f64 / seconds),
            output_throughput: output_tokens as f64 / seconds,
            total_throughput: (input_tokens + output_tokens) as f64 / seconds,
            peak_output_throughput: peak_output_throughput(&completed),
            peak_concurrency: peak_concurrency(&completed),
            ttft: times(|request| request.ttft),
            tpot: times(RequestRecord::tpot),
            itl: Summary::of(
                completed
                    .iter()
                    .flat_map(|request| request.itl.iter().copied())
                    .collect(),
            ),
            e2el: times(|request| Some(request.latency)),
            send_delay: Summary::of(
                requests
                    .iter()
                    .map(|request| request.start - request.due)
                    .collect(),
            ),
        }
    }
}

/// Returns whether a completed request keeps the bounds. A request of one token has no time per
/// output token, and keeps the bound of it.
fn is_good(request: &RequestRecord, slo: &Slo) -> bool {
    let keeps = |time: Option<f64>, bound: Option<Duration>| {
        bound.is_none_or(|bound| time.unwrap_or(0.0) <= bound.as_secs_f64())
    };
    keeps(request.ttft, slo.ttft)
        && keeps(request.tpot(), slo.tpot)
        && keeps(Some(request.latency), slo.e2el)
}

fn peak_output_throughput(completed: &[&RequestRecord]) -> f64 {
    let first = completed
        .iter()
        .map(|request| request.start)
        .reduce(f64::min);
    let first = first.unwrap_or(0.0);
    let mut seconds: Vec<usize> = Vec::new();
    for request in completed {
        let mut at = request.start + request.ttft.unwrap_or(0.0);
        for gap in std::iter::once(&0.0).chain(&request.itl) {
            at += gap;
            let second = (at - first) as usize;
            if seconds.len() <= second {
                seconds.resize(second + 1, 0);
            }
            seconds[second] += 1;
        }
    }
    seconds.into_iter().max().unwrap_or(0) as f64
}

fn peak_concurrency(completed: &[&RequestRecord]) -> usize {
    let mut changes: Vec<(f64, i64)> = (completed.iter())
        .flat_map(|request| [(request.start, 1), (request.start + request.latency, -1)])
        .collect();
    // At the same time, requests end before others start.
    changes.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
    let (mut now, mut peak) = (0, 0);
    for (_, change) in changes {
        now += change;
        peak = peak.max(now);
    }
    peak as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Failure;

    fn request(start: f64, ttft: f64, itl: &[f64], tokens: usize) -> RequestRecord {
        RequestRecord {
            index: 0,
            due: start - 0.001,
            start,
            ttft: Some(ttft),
            latency: ttft + itl.iter().sum::<f64>(),
            itl: itl.to_vec(),
            input_tokens: 10,
            output_tokens: tokens,
            outcome: Outcome::Completed,
        }
    }

    fn close(one: f64, other: f64) {
        assert!((one - other).abs() < 1e-9, "{one} is not {other}");
    }

    #[test]
    fn percentiles_are_those_of_numpy() {
        // numpy.percentile([4, 1, 3, 2], [50, 90, 99]) and numpy.std.
        let summary = Summary::of(vec![4.0, 1.0, 3.0, 2.0]);
        close(summary.mean, 2.5);
        close(summary.median, 2.5);
        close(summary.p90, 3.7);
        close(summary.p99, 3.97);
        close(summary.std, 1.25_f64.sqrt());
        assert_eq!(Summary::of(Vec::new()), Summary::default());
        assert_eq!(Summary::of(vec![7.0]).p99, 7.0);
    }

    #[test]
    fn figures_are_those_of_their_definitions() {
        // The second has two tokens in an event, the third is one token.
        let mut requests = vec![
            request(0.0, 0.5, &[0.1, 0.3], 3),
            request(0.25, 0.25, &[0.5], 3),
            request(1.0, 0.75, &[], 1),
        ];
        let mut failed = request(0.0, 0.1, &[9.0], 2);
        failed.outcome = Outcome::Failed(Failure::Status {
            status: 503,
            message: String::new(),
        });
        let mut cancelled = request(0.0, 0.1, &[9.0], 2);
        cancelled.outcome = Outcome::Cancelled;
        requests.extend([failed, cancelled]);
        let slo = Slo {
            ttft: Some(Duration::from_millis(600)),
            tpot: Some(Duration::from_millis(240)),
            e2el: None,
        };
        let metrics = Metrics::of(&requests, Duration::from_secs(2), &slo);
        assert_eq!(
            (metrics.completed, metrics.failed, metrics.cancelled),
            (3, 1, 1)
        );
        assert_eq!(
            metrics.failures,
            BTreeMap::from([("status 503".to_string(), 1)])
        );
        assert_eq!((metrics.input_tokens, metrics.output_tokens), (30, 7));
        close(metrics.request_throughput, 1.5);
        close(metrics.output_throughput, 3.5);
        close(metrics.total_throughput, 18.5);
        close(metrics.ttft.mean, 0.5);
        // 0.4 / 2 and 0.5 / 2.
        close(metrics.tpot.mean, 0.225);
        close(metrics.itl.mean, 0.3);
        close(metrics.itl.median, 0.3);
        close(metrics.e2el.mean, (0.9 + 0.75 + 0.75) / 3.0);
        close(metrics.send_delay.mean, 0.001);
        // The first alone is good: the second is slow after its first token, the third before.
        assert_eq!(metrics.request_goodput, Some(0.5));
        // 0.5, 0.6, 0.9 and 0.5 are in the first second, 1.0 and 1.75 in the second.
        assert_eq!(metrics.peak_output_throughput, 4.0);
        // The second ends as the third starts.
        assert_eq!(metrics.peak_concurrency, 2);
        assert_eq!(Metrics::of(&[], Duration::from_secs(1), &slo).completed, 0);
    }
}
