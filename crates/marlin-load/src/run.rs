//! The run of a load test.

use crate::arrival::arrivals;
use crate::client::Client;
use crate::error::{Failure, LoadError};
use crate::generate::generate;
use crate::metrics::Metrics;
use crate::options::{Amount, Endpoint, LoadOptions, PromptKind};
use crate::prompt::{RequestMaker, Vocabulary, sample_text};
use crate::record::{Outcome, RequestRecord};
use crate::report::LoadReport;
use hyper::Method;
use hyper::body::Bytes;
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

/// The longest time for an answer about the model or its tokens.
const SETUP_TIMEOUT: Duration = Duration::from_secs(60);

/// How far a load test is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoadProgress {
    /// The requests that were sent, without those before the measurement.
    pub sent: usize,
    /// Those of them that have ended.
    pub ended: usize,
    /// Those of them that failed.
    pub failed: usize,
}

/// Runs a load test, on threads of its own, and returns its result.
///
/// It ends by itself: after the last request has ended, each of which ends within
/// [`LoadOptions::request_timeout`]. Requests that fail are counted.
///
/// # Errors
///
/// If an option has no meaning, or if the server does not answer before the measurement.
pub fn run(options: &LoadOptions) -> Result<LoadReport, LoadError> {
    run_with(options, |_| {})
}

/// Runs a load test as [`run`] does, and calls a function with its progress after requests were
/// sent or have ended.
///
/// The function is called on this thread, and not for every request if it is slow: it delays
/// nothing.
///
/// # Errors
///
/// Those of [`run`].
pub fn run_with(
    options: &LoadOptions,
    mut progress: impl FnMut(LoadProgress),
) -> Result<LoadReport, LoadError> {
    options.check()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(options.threads)
        .thread_name("load")
        .enable_all()
        .build()?;
    runtime.block_on(async {
        // On a thread of the runtime: the thread that blocks is one more.
        let options = options.clone();
        let (sender, mut receiver) = watch::channel(LoadProgress::default());
        let task = tokio::spawn(async move { measure(&options, Arc::new(sender)).await });
        // Until the task has ended, and the sender with it.
        while receiver.changed().await.is_ok() {
            let now = *receiver.borrow_and_update();
            progress(now);
        }
        match task.await {
            Ok(result) => result,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    })
}

async fn measure(
    options: &LoadOptions,
    progress: Arc<watch::Sender<LoadProgress>>,
) -> Result<LoadReport, LoadError> {
    let client = Arc::new(Client::new(options).await?);
    let model = match &options.model {
        Some(model) => model.clone(),
        None => first_model(&client).await?,
    };
    let maker = prepare(options, &client, &model).await?;
    tracing::info!(model, "the measurement starts");
    let origin = Instant::now();
    let mut requests = send_all(options, &client, &maker, origin, &progress).await?;
    let duration = origin.elapsed();
    requests.sort_by_key(|request| request.index);
    Ok(LoadReport {
        base_url: options.base_url.clone(),
        model,
        endpoint: options.endpoint,
        load: options.load,
        input_len: options.input_len,
        prefix_len: options.prefix_len,
        output_len: options.output_len,
        token_ids: maker.has_token_ids(),
        seed: options.seed,
        duration,
        metrics: Metrics::of(&requests, duration, &options.slo),
        requests,
    })
}

/// Sends the requests of the measurement, and returns what happened to them, in the order in which
/// they ended.
async fn send_all(
    options: &LoadOptions,
    client: &Arc<Client>,
    maker: &RequestMaker,
    origin: Instant,
    progress: &Arc<watch::Sender<LoadProgress>>,
) -> Result<Vec<RequestRecord>, LoadError> {
    let places = options
        .load
        .concurrency
        .map(|count| Arc::new(Semaphore::new(count)));
    let end = match options.amount {
        Amount::Duration(duration) => origin.checked_add(duration),
        Amount::Requests(_) => None,
    };
    let limit = options.request_timeout;
    let mut running = JoinSet::new();
    let mut requests = Vec::new();
    for (index, at) in arrivals(&options.load, options.amount, options.seed).enumerate() {
        // Before its time, so that making it delays nothing.
        let request = maker.request(index)?;
        let mut due = at;
        if at > 0.0 {
            sleep_until(origin + Duration::from_secs_f64(at)).await;
        }
        let mut place = None;
        if let Some(places) = &places {
            let free = places.clone().acquire_owned();
            let free = match end {
                Some(end) => match timeout_at(end, free).await {
                    Ok(free) => free,
                    Err(_) => break,
                },
                None => free.await,
            };
            // It is never closed.
            place = free.ok();
            due = due.max(origin.elapsed().as_secs_f64());
            if end.is_some_and(|end| Instant::now() >= end) {
                break;
            }
        }
        let client = client.clone();
        progress.send_modify(|progress| progress.sent += 1);
        let progress = progress.clone();
        running.spawn(async move {
            let record = generate(&client, &request, origin, due, limit).await;
            progress.send_modify(|progress| {
                progress.ended += 1;
                progress.failed += usize::from(matches!(record.outcome, Outcome::Failed(_)));
            });
            drop(place);
            record
        });
        while let Some(ended) = running.try_join_next() {
            requests.push(joined(ended));
        }
    }
    while let Some(ended) = running.join_next().await {
        requests.push(joined(ended));
    }
    Ok(requests)
}

/// Returns the result of a task, which is never cancelled, or passes its panic on.
fn joined(ended: Result<RequestRecord, tokio::task::JoinError>) -> RequestRecord {
    ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

async fn first_model(client: &Client) -> Result<String, LoadError> {
    const PATH: &str = "/v1/models";
    let models = client
        .ask::<Models>(Method::GET, PATH, Bytes::new(), SETUP_TIMEOUT)
        .await;
    let models = models.map_err(|failure| LoadError::Setup {
        path: PATH,
        failure,
    })?;
    match models.data.into_iter().next() {
        Some(model) => Ok(model.id),
        None => Err(LoadError::NoModel),
    }
}

#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
}

/// Returns token IDs of the model that texts have.
async fn token_ids(client: &Client, model: &str, seed: u64) -> Result<Vec<u32>, Failure> {
    let body = json!({"model": model, "prompt": sample_text(seed), "add_special_tokens": false});
    let body = Bytes::from(body.to_string());
    let tokens: Tokens = client
        .ask(Method::POST, "/tokenize", body, SETUP_TIMEOUT)
        .await?;
    let tokens: BTreeSet<u32> = tokens.tokens.into_iter().collect();
    if tokens.is_empty() {
        return Err(Failure::Malformed("a text has no tokens".into()));
    }
    Ok(tokens.into_iter().collect())
}

/// Finds out what prompts the server takes, and sends the requests before the measurement.
async fn prepare(
    options: &LoadOptions,
    client: &Client,
    model: &str,
) -> Result<RequestMaker, LoadError> {
    let vocabulary = match (options.prompt, options.vocab_size) {
        (PromptKind::Words, _) => Vocabulary::Words,
        _ if options.endpoint == Endpoint::Chat => Vocabulary::Words,
        (_, Some(size)) => Vocabulary::Below(size),
        (kind, None) => match token_ids(client, model, options.seed).await {
            Ok(tokens) => Vocabulary::Listed(tokens),
            Err(failure) if kind == PromptKind::TokenIds => {
                let path = "/tokenize";
                return Err(LoadError::Setup { path, failure });
            }
            Err(failure) => {
                tracing::warn!(%failure, "/tokenize does not answer; prompts are words");
                Vocabulary::Words
            }
        },
    };
    let mut maker = RequestMaker::new(options, model.to_string(), vocabulary);
    match warm_up(options, client, &maker, 0).await? {
        Ok(()) => {}
        Err(Failure::Status {
            status: 400 | 422 | 501,
            message,
        }) if options.prompt == PromptKind::Auto && maker.has_token_ids() => {
            tracing::warn!(message, "the server refuses token IDs; prompts are words");
            maker = RequestMaker::new(options, model.to_string(), Vocabulary::Words);
            let result = warm_up(options, client, &maker, 0).await?;
            result.map_err(|failure| setup(options, failure))?;
        }
        Err(failure) => return Err(setup(options, failure)),
    }
    for index in 1..=options.warmups {
        let result = warm_up(options, client, &maker, index).await?;
        result.map_err(|failure| setup(options, failure))?;
    }
    Ok(maker)
}

fn setup(options: &LoadOptions, failure: Failure) -> LoadError {
    LoadError::Setup {
        path: options.endpoint.path(),
        failure,
    }
}

/// Sends a request before the measurement. The inner result is that of the request.
async fn warm_up(
    options: &LoadOptions,
    client: &Client,
    maker: &RequestMaker,
    index: usize,
) -> Result<Result<(), Failure>, LoadError> {
    let request = maker.warmup(index)?;
    let limit = options.request_timeout;
    let record = generate(client, &request, Instant::now(), 0.0, limit).await;
    Ok(match record.outcome {
        Outcome::Failed(failure) => Err(failure),
        Outcome::Completed | Outcome::Cancelled => Ok(()),
    })
}
