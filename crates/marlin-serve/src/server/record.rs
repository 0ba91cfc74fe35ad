//! Counts what happens to requests.

use super::event::{EndReason, FailReason};
use super::handle::Shared;
use super::live::{Last, Live};
use super::metrics::ServerMetrics;
use crate::scheduler::Metrics;
use std::time::Duration;

/// Counts what happens to requests, and publishes the figures after each step.
pub(super) struct Recorder<'t> {
    metrics: ServerMetrics,
    /// The tokens of the step: of prompts that end with it, and generated ones.
    step_tokens: usize,
    shared: &'t Shared,
}

impl<'t> Recorder<'t> {
    pub fn new(shared: &'t Shared) -> Self {
        Self {
            metrics: shared.metrics().clone(),
            step_tokens: 0,
            shared,
        }
    }

    /// Counts a request that left the waiting queue for the first time, with `cached` tokens of its
    /// prompt in the KV cache.
    pub fn admitted(&mut self, live: &Live<'_>, cached: usize) {
        if live.is_trial {
            return;
        }
        self.metrics.prefix_queries += live.prompt_tokens() as u64;
        self.metrics.prefix_hits += cached as u64;
    }

    pub fn preempted(&mut self) {
        self.metrics.preemptions += 1;
    }

    /// Counts a token of a request.
    pub fn token(&mut self, live: &mut Live<'_>, now: Duration) {
        if live.is_trial {
            return;
        }
        let prompt_tokens = live.prompt_tokens();
        let times = &mut live.times;
        let metrics = &mut self.metrics;
        metrics.generation_tokens += 1;
        self.step_tokens += 1;
        match times.last_token.replace(now) {
            Some(last) => metrics.inter_token_latency.observe_time(now - last),
            None => {
                times.first_token = Some(now);
                metrics.prompt_tokens += prompt_tokens as u64;
                self.step_tokens += prompt_tokens;
                let arrival = times.arrival;
                metrics
                    .time_to_first_token
                    .observe_time(now.saturating_sub(arrival));
            }
        }
    }

    pub fn end_step(&mut self) {
        self.metrics.steps += 1;
        let tokens = std::mem::take(&mut self.step_tokens);
        self.metrics.iteration_tokens.observe(tokens as f64);
    }

    /// Counts a request that ended.
    pub fn ended(&mut self, live: &Live<'_>, last: &Last, now: Duration) {
        if live.is_trial {
            return;
        }
        let ended = &mut self.metrics.ended;
        let count = match last {
            Last::End(EndReason::Length) => &mut ended.length,
            Last::End(_) => &mut ended.stop,
            Last::Cancelled => &mut ended.cancelled,
            Last::Failed(FailReason::SlowReader { .. } | FailReason::ShutDown) => {
                &mut ended.cancelled
            }
            Last::Failed(FailReason::QueueTimeout(_) | FailReason::Timeout(_)) => {
                &mut ended.timeout
            }
            Last::Failed(_) => &mut ended.failed,
        };
        *count += 1;
        let metrics = &mut self.metrics;
        let times = &live.times;
        let latency = now.saturating_sub(times.arrival);
        metrics.request_latency.observe_time(latency);
        if !matches!(last, Last::End(_)) {
            return;
        }
        let usage = live.usage();
        let [prompt, generated] = [usage.prompt_tokens, usage.completion_tokens];
        metrics.request_prompt_tokens.observe(prompt as f64);
        metrics.request_generation_tokens.observe(generated as f64);
        metrics.request_max_tokens.observe(live.max_tokens() as f64);
        let (Some(admitted), Some(first), Some(last)) =
            (times.admitted, times.first_token, times.last_token)
        else {
            return;
        };
        metrics
            .queue_time
            .observe_time(admitted.saturating_sub(times.arrival));
        metrics.prefill_time.observe_time(first - admitted);
        metrics.decode_time.observe_time(last - first);
        metrics.inference_time.observe_time(last - admitted);
        if generated > 1 {
            let time = (last - first).as_secs_f64() / (generated - 1) as f64;
            metrics.time_per_output_token.observe(time);
        }
    }

    /// Publishes the figures, with those of the scheduler.
    pub fn publish(&mut self, scheduler: Metrics) {
        let metrics = &mut self.metrics;
        metrics.running = scheduler.running;
        metrics.waiting = scheduler.waiting;
        metrics.used_pages = scheduler.used_pages;
        metrics.cached_pages = scheduler.cached_pages;
        self.shared.metrics().clone_from(metrics);
    }
}
