//! What happened to a request.

use crate::error::Failure;
use serde::Serialize;

/// A request and its times, in seconds. Those of the run count from its start.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RequestRecord {
    /// The number of the request, from 0 in the order of arrival.
    pub index: usize,
    /// The time at which the request was to be sent: its arrival, or when one before it made place.
    pub due: f64,
    /// The time at which the request was sent.
    pub start: f64,
    /// The time from `start` to the first token.
    pub ttft: Option<f64>,
    /// The times between the events with tokens.
    pub itl: Vec<f64>,
    /// The time from `start` to the last event of the answer; to the failure or the cancel of a
    /// request that was not completed.
    pub latency: f64,
    /// The tokens of the prompt, as the server counts them where it does.
    pub input_tokens: usize,
    /// The tokens of the answer, as the server counts them, else the events with tokens.
    pub output_tokens: usize,
    /// How it ended.
    #[serde(flatten)]
    pub outcome: Outcome,
}

impl RequestRecord {
    /// Returns the mean time of the output tokens after the first, in seconds; none if there is one
    /// token or none.
    pub fn tpot(&self) -> Option<f64> {
        let later = self
            .output_tokens
            .checked_sub(1)
            .filter(|&later| later > 0)?;
        Some((self.latency - self.ttft?) / later as f64)
    }
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
pub enum Outcome {
    /// The answer was complete.
    Completed,
    /// The generator closed the connection on purpose.
    Cancelled,
    /// The request failed. A record has the fields `kind` and `message`.
    Failed(Failure),
}
