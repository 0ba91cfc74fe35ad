//! What the server says of itself.

use crate::error::{failure, json};
use crate::state::ApiState;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use marlin_serve::server::{EndCounts, Health, Histogram, ServerHandle, ServerMetrics};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use serde_json::json;
use std::fmt;

/// Answers `GET /health`: 200 while requests are taken, else 503 with the reason.
pub(crate) async fn health(State(state): State<ApiState>) -> Response {
    let (status, name, reason) = match state.engine().health() {
        Health::Ok => (StatusCode::OK, "ok", None),
        Health::StepFailed(reason) => (StatusCode::SERVICE_UNAVAILABLE, "failing", Some(reason)),
        Health::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down", None),
        Health::Failed(reason) => (StatusCode::SERVICE_UNAVAILABLE, "failed", Some(reason)),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "stopped", None),
    };
    let body = match reason {
        None => json!({ "status": name }),
        Some(reason) => json!({ "status": name, "reason": reason }),
    };
    (status, json(&body)).into_response()
}

/// Answers `GET /version`.
pub(crate) async fn version() -> Response {
    json(&json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// Answers `GET /server_info`: what SGLang's router asks a worker for.
pub(crate) async fn server_info(State(state): State<ApiState>) -> Response {
    let scheduler = &state.engine().options().scheduler;
    // Without `model_path`, from which the router would load a tokenizer of its own.
    json(&json!({
        "served_model_name": state.model().name,
        "version": env!("CARGO_PKG_VERSION"),
        "max_running_requests": scheduler.max_sequences,
        "max_total_tokens": (scheduler.pages as usize).saturating_mul(scheduler.page_size),
    }))
}

/// Answers `GET /model_info`: what SGLang's router asks a worker for.
pub(crate) async fn model_info() -> Response {
    json(&json!({ "is_generation": true }))
}

/// Answers `GET /metrics`, in the text format of OpenMetrics, which Prometheus reads.
pub(crate) async fn metrics(State(state): State<ApiState>) -> Response {
    const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let mut body = String::new();
    match text::encode(&mut body, &state.exposition().0) {
        Ok(()) => ([(header::CONTENT_TYPE, TYPE)], body).into_response(),
        Err(error) => failure(error),
    }
}

/// The figures of an engine, as Prometheus reads them.
#[derive(Debug)]
pub(crate) struct Exposition(Registry);

impl Exposition {
    /// `model` is the value of the label `model_name`.
    pub fn new(engine: ServerHandle, model: &str) -> Self {
        let label = ("model_name".into(), model.to_string().into());
        let mut registry = Registry::with_labels([label].into_iter());
        registry.register_collector(Box::new(Figures(engine)));
        Self(registry)
    }
}

/// Writes the figures that the engine has at the moment.
#[derive(Debug)]
struct Figures(ServerHandle);

impl Collector for Figures {
    fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
        let metrics = self.0.metrics();
        let mut writer = Writer(encoder);
        writer.gauges(&metrics)?;
        writer.counters(&metrics)?;
        writer.ends(&metrics.ended)?;
        writer.histograms(&metrics)
    }
}

struct Writer<'a>(DescriptorEncoder<'a>);

impl Writer<'_> {
    fn gauges(&mut self, metrics: &ServerMetrics) -> fmt::Result {
        let gauges = [
            (
                "vllm:num_requests_running",
                "Number of requests in model execution batches",
                metrics.running as f64,
            ),
            (
                "vllm:num_requests_waiting",
                "Number of requests waiting to be processed",
                metrics.waiting as f64,
            ),
            (
                "vllm:kv_cache_usage_perc",
                "KV-cache usage. 1 means 100 percent usage",
                metrics.cache_usage(),
            ),
        ];
        for (name, help, value) in gauges {
            let mut metric = self
                .0
                .encode_descriptor(name, help, None, MetricType::Gauge)?;
            metric.encode_gauge(&value)?;
        }
        Ok(())
    }

    fn counters(&mut self, metrics: &ServerMetrics) -> fmt::Result {
        // The format adds `_total` to the names.
        let counters = [
            (
                "vllm:num_preemptions",
                "Cumulative number of preemptions",
                metrics.preemptions,
            ),
            (
                "vllm:prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens",
                metrics.prefix_queries,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prefix cache hits, in terms of number of cached tokens",
                metrics.prefix_hits,
            ),
            (
                "vllm:prompt_tokens",
                "Number of prefill tokens processed",
                metrics.prompt_tokens,
            ),
            (
                "vllm:generation_tokens",
                "Number of generation tokens processed",
                metrics.generation_tokens,
            ),
        ];
        for (name, help, value) in counters {
            let mut metric = self
                .0
                .encode_descriptor(name, help, None, MetricType::Counter)?;
            metric.encode_counter::<NoLabelSet, _, f64>(&value, None)?;
        }
        Ok(())
    }

    fn ends(&mut self, ended: &EndCounts) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(
            "vllm:request_success",
            "Count of ended requests",
            None,
            MetricType::Counter,
        )?;
        for (reason, count) in [
            ("stop", ended.stop),
            ("length", ended.length),
            ("abort", ended.cancelled),
            ("timeout", ended.timeout),
            ("error", ended.failed),
        ] {
            metric
                .encode_family(&[("finished_reason", reason)])?
                .encode_counter::<NoLabelSet, _, f64>(&count, None)?;
        }
        Ok(())
    }

    fn histograms(&mut self, metrics: &ServerMetrics) -> fmt::Result {
        let histograms: [(&str, &str, &Histogram); 12] = [
            (
                "vllm:iteration_tokens_total",
                "Histogram of number of tokens per engine_step",
                &metrics.iteration_tokens,
            ),
            (
                "vllm:time_to_first_token_seconds",
                "Histogram of time to first token in seconds",
                &metrics.time_to_first_token,
            ),
            (
                "vllm:inter_token_latency_seconds",
                "Histogram of inter token latency in seconds",
                &metrics.inter_token_latency,
            ),
            (
                "vllm:request_time_per_output_token_seconds",
                "Histogram of time per output token in seconds per request",
                &metrics.time_per_output_token,
            ),
            (
                "vllm:e2e_request_latency_seconds",
                "Histogram of e2e request latency in seconds",
                &metrics.request_latency,
            ),
            (
                "vllm:request_queue_time_seconds",
                "Histogram of time spent in WAITING phase for request",
                &metrics.queue_time,
            ),
            (
                "vllm:request_prefill_time_seconds",
                "Histogram of time spent in PREFILL phase for request",
                &metrics.prefill_time,
            ),
            (
                "vllm:request_decode_time_seconds",
                "Histogram of time spent in DECODE phase for request",
                &metrics.decode_time,
            ),
            (
                "vllm:request_inference_time_seconds",
                "Histogram of time spent in RUNNING phase for request",
                &metrics.inference_time,
            ),
            (
                "vllm:request_prompt_tokens",
                "Number of prefill tokens processed",
                &metrics.request_prompt_tokens,
            ),
            (
                "vllm:request_generation_tokens",
                "Number of generation tokens processed",
                &metrics.request_generation_tokens,
            ),
            (
                "vllm:request_params_max_tokens",
                "Histogram of the max_tokens request parameter",
                &metrics.request_max_tokens,
            ),
        ];
        for (name, help, histogram) in histograms {
            let buckets: Vec<_> = histogram.buckets().collect();
            let mut metric = self
                .0
                .encode_descriptor(name, help, None, MetricType::Histogram)?;
            metric.encode_histogram::<NoLabelSet>(
                histogram.sum(),
                histogram.count(),
                &buckets,
                None,
            )?;
        }
        Ok(())
    }
}
