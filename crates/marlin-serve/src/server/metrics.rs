//! The figures of a server, with the meanings and the bounds of vLLM's.

use std::time::Duration;

/// The figures of a server, since its start.
///
/// Each field says which metric of vLLM has the same meaning. Times are in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerMetrics {
    /// The sequences that are running: `num_requests_running`.
    pub running: usize,
    /// The requests that are waiting, the pre-empted ones included: `num_requests_waiting`.
    pub waiting: usize,
    /// The pages that sequences use.
    pub used_pages: usize,
    /// The pages of prefixes that no sequence uses, which can be evicted.
    pub cached_pages: usize,
    /// The pages of the KV cache.
    pub pages: usize,
    /// The pre-emptions: `num_preemptions_total`.
    pub preemptions: u64,
    /// The tokens of the prompts of admitted requests, which were looked up in the prefix tree:
    /// `prefix_cache_queries_total`.
    pub prefix_queries: u64,
    /// Those of them that were there: `prefix_cache_hits_total`.
    pub prefix_hits: u64,
    /// The tokens of prompts that were computed or taken from the prefix tree:
    /// `prompt_tokens_total`.
    pub prompt_tokens: u64,
    /// The generated tokens: `generation_tokens_total`.
    pub generation_tokens: u64,
    /// The steps.
    pub steps: u64,
    /// The requests that ended, by reason: `request_success_total`.
    pub ended: EndCounts,
    /// The tokens of prompts that ended with the step, and the generated tokens, for each step:
    /// `iteration_tokens_total`.
    pub iteration_tokens: Histogram,
    /// The time from the arrival of a request to its first token: `time_to_first_token_seconds`.
    pub time_to_first_token: Histogram,
    /// The time from each token to the next of the same request: `inter_token_latency_seconds`.
    pub inter_token_latency: Histogram,
    /// The mean time of a token after the first, for each complete request:
    /// `request_time_per_output_token_seconds`.
    pub time_per_output_token: Histogram,
    /// The time from the arrival of a request to its end: `e2e_request_latency_seconds`.
    pub request_latency: Histogram,
    /// The time from the arrival of a request until it first left the queue:
    /// `request_queue_time_seconds`.
    pub queue_time: Histogram,
    /// The time from the first leaving of the queue to the first token:
    /// `request_prefill_time_seconds`.
    pub prefill_time: Histogram,
    /// The time from the first token to the last one: `request_decode_time_seconds`.
    pub decode_time: Histogram,
    /// The time from the first leaving of the queue to the last token:
    /// `request_inference_time_seconds`.
    pub inference_time: Histogram,
    /// The tokens of the prompt of each complete request: `request_prompt_tokens`.
    pub request_prompt_tokens: Histogram,
    /// The generated tokens of each complete request: `request_generation_tokens`.
    pub request_generation_tokens: Histogram,
    /// The [`max_tokens`](super::GenerationRequest::max_tokens) of each complete request:
    /// `request_params_max_tokens`.
    pub request_max_tokens: Histogram,
}

/// The numbers of requests that ended, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EndCounts {
    /// Requests that ended by a stop token, a stop string, or the end of the sequence: `stop`.
    pub stop: u64,
    /// Requests that ended with all their tokens: `length`.
    pub length: u64,
    /// Requests whose client went or was too slow, or whose server was shut down: `abort`.
    pub cancelled: u64,
    /// Requests that ended by a time-out; vLLM has none.
    pub timeout: u64,
    /// Requests that ended by a failure: `error`.
    pub failed: u64,
}

/// The bounds of the time to the first token.
const FIRST_TOKEN: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// The bounds of the time of a token.
const TOKEN: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
/// The bounds of the time of a request or of a part of it.
const REQUEST: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
/// The bounds of the tokens of a step.
const STEP_TOKENS: [f64; 13] = [
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
];

impl ServerMetrics {
    /// Makes the figures of a server with `pages` pages and sequences of up to `max_len` tokens.
    pub(super) fn new(pages: usize, max_len: usize) -> Self {
        let tokens = token_bounds(max_len);
        Self {
            running: 0,
            waiting: 0,
            used_pages: 0,
            cached_pages: 0,
            pages,
            preemptions: 0,
            prefix_queries: 0,
            prefix_hits: 0,
            prompt_tokens: 0,
            generation_tokens: 0,
            steps: 0,
            ended: EndCounts::default(),
            iteration_tokens: Histogram::new(&STEP_TOKENS),
            time_to_first_token: Histogram::new(&FIRST_TOKEN),
            inter_token_latency: Histogram::new(&TOKEN),
            time_per_output_token: Histogram::new(&TOKEN),
            request_latency: Histogram::new(&REQUEST),
            queue_time: Histogram::new(&REQUEST),
            prefill_time: Histogram::new(&REQUEST),
            decode_time: Histogram::new(&REQUEST),
            inference_time: Histogram::new(&REQUEST),
            request_prompt_tokens: Histogram::new(&tokens),
            request_generation_tokens: Histogram::new(&tokens),
            request_max_tokens: Histogram::new(&tokens),
        }
    }

    /// Returns the part of the KV cache that sequences use, 0 to 1: `kv_cache_usage_perc`.
    pub fn cache_usage(&self) -> f64 {
        self.used_pages as f64 / self.pages as f64
    }
}

/// Returns 1, 2, 5, 10, 20, 50, .. up to `most`.
fn token_bounds(most: usize) -> Vec<f64> {
    let powers = (0..).map(|exponent| 10_usize.saturating_pow(exponent));
    powers
        .flat_map(|power| [1, 2, 5].map(|digit| power.saturating_mul(digit)))
        .take_while(|&bound| bound <= most && bound < usize::MAX)
        .map(|bound| bound as f64)
        .collect()
}

/// Counts of values by ranges.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    bounds: Vec<f64>,
    /// One for each bound, and one for the values above all of them.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &[f64]) -> Self {
        Self {
            bounds: bounds.to_vec(),
            counts: vec![0; bounds.len() + 1],
            sum: 0.0,
        }
    }

    pub(super) fn observe(&mut self, value: f64) {
        let range = self.bounds.partition_point(|&bound| bound < value);
        self.counts[range] += 1;
        self.sum += value;
    }

    pub(super) fn observe_time(&mut self, time: Duration) {
        self.observe(time.as_secs_f64());
    }

    /// Returns each range's upper bound, which belongs to it, and the number of values in it. The
    /// last bound is infinite.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        bounds.zip(self.counts.iter().copied())
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of the values.
    pub fn sum(&self) -> f64 {
        self.sum
    }
}
