//! Servers and clients of the tests.

use crate::model::{Control, EOS, Model};
use futures_lite::{StreamExt, future::block_on};
use marlin_serve::SchedulerConfig;
use marlin_serve::server::{
    EndReason, EventStream, FailReason, GenerationRequest, SamplingParams, Server, ServerHandle,
    ServerMetrics, ServerOptions, TokenEvent, Usage,
};
use marlin_text::Tokenizer;
use rand::RngExt;
use rand::rngs::StdRng;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A server with a model.
pub struct Fixture {
    pub handle: ServerHandle,
    pub control: Arc<Control>,
}

impl Fixture {
    /// Starts a server of 64 sequences and 4096 pages of 4 positions, with these changes.
    pub fn new(change: impl FnOnce(&mut ServerOptions)) -> Self {
        Self::with_model(true, change)
    }

    /// Starts a server whose executor can run ahead or not.
    pub fn with_model(runs_ahead: bool, change: impl FnOnce(&mut ServerOptions)) -> Self {
        let mut options = ServerOptions::new(SchedulerConfig {
            page_size: 4,
            max_step_tokens: 256,
            ..SchedulerConfig::new(4096)
        });
        options.eos_tokens = vec![EOS];
        change(&mut options);
        let (model, control) = Model::new(&options.scheduler, runs_ahead);
        let handle = Server::start(model, tokenizer(), options).unwrap();
        Self { handle, control }
    }

    pub fn submit(&self, request: GenerationRequest) -> EventStream {
        self.handle.submit(request).unwrap()
    }

    pub fn run(&self, request: GenerationRequest) -> Answer {
        Answer::read(self.submit(request))
    }

    /// Waits until so many requests have ended, no other one is there, and no page is in use.
    /// Returns the metrics.
    pub fn idle(&self, requests: u64) -> ServerMetrics {
        let start = Instant::now();
        loop {
            let metrics = self.handle.metrics();
            let ended = metrics.ended;
            let all = ended.stop + ended.length + ended.cancelled + ended.timeout + ended.failed;
            let left = metrics.running + metrics.waiting + metrics.used_pages;
            if all == requests && left == 0 {
                assert_eq!(self.control.state().sequences, 0);
                return metrics;
            }
            let waited = start.elapsed();
            assert!(waited < Duration::from_secs(60), "still busy: {metrics:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::open(&marlin_testing::byte_level_file()).unwrap()
}

/// Returns a greedy request for up to `max_tokens` tokens.
pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> GenerationRequest {
    GenerationRequest {
        max_tokens: Some(max_tokens),
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        ..GenerationRequest::new(prompt)
    }
}

/// Returns a text of `len` tokens as a prompt.
pub fn prompt(rng: &mut StdRng, len: usize) -> Vec<u32> {
    (0..len).map(|_| rng.random_range(97..123)).collect()
}

/// All that came of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub text: String,
    pub end: Result<EndReason, FailReason>,
    pub usage: Usage,
}

impl Answer {
    /// Reads a stream to its end. Checks that nothing comes after the last event, and that the last
    /// token of a complete request says so.
    pub fn read(mut stream: EventStream) -> Self {
        let mut tokens = Vec::new();
        let mut all = String::new();
        let mut complete = false;
        let (end, usage) = loop {
            match block_on(stream.next()).expect("the last event has not come") {
                TokenEvent::Token {
                    token,
                    text,
                    is_last,
                    ..
                } => {
                    assert!(!complete, "a token after the last one");
                    tokens.push(token);
                    all += &text;
                    complete = is_last;
                }
                TokenEvent::End { reason, usage } => break (Ok(reason), usage),
                TokenEvent::Failed { reason, usage } => break (Err(reason), usage),
            }
        };
        assert_eq!(complete, end.is_ok(), "whether a token was the last one");
        assert_eq!(block_on(stream.next()), None);
        Self {
            tokens,
            text: all,
            end,
            usage,
        }
    }
}
