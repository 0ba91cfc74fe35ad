//! Serves a model over HTTP.

use super::open_model;
use crate::args::ServeArgs;
use crate::error::CliError;
use marlin_http::{ApiOptions, ApiState, Model, ServeOptions, serve, shown_tokens, tls_config};
use marlin_lm::{ChatTemplate, LanguageModel, Tokenizer};
use marlin_serve::model::{self, ModelOptions};
use marlin_serve::server::SamplingParams;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use tokio::net::TcpSocket;

/// Connections that wait until they are accepted.
const BACKLOG: u32 = 1024;

/// Serves a model until SIGINT or SIGTERM.
pub fn run(args: &ServeArgs) -> Result<(), CliError> {
    // Faults of the command line are found before the model is read.
    let tls = match (&args.tls_certificate, &args.tls_key) {
        (Some(certificate), Some(key)) => Some(tls_config(certificate, key)?),
        _ => None,
    };
    let address = SocketAddr::new(args.host, args.port);
    let runtime = tokio::runtime::Runtime::new().map_err(CliError::Runtime)?;
    let socket = bind(address).map_err(|source| CliError::Listen { address, source })?;
    if !args.host.is_loopback() && args.api_key.is_empty() {
        tracing::warn!(%address, "other machines can reach this server, and it has no --api-key");
    }

    let (dir, llama) = open_model(&args.model.dir, &args.model.hub, &args.model, true)?;
    let template = ChatTemplate::open(&dir)?;
    #[cfg(feature = "cubecl-runtime")]
    let compiled_marks = crate::kernel_cache::compiled_marks();
    #[cfg(not(feature = "cubecl-runtime"))]
    let compiled_marks = None;
    let mut options = ModelOptions::default();
    options.max_sequences = args.max_sequences.into();
    options.max_waiting = args.max_waiting;
    options.max_step_tokens = args.max_step_tokens;
    options.page_size = args.page_size;
    options.cache_format = args.kv_cache_dtype.into();
    options.pages = args.pages;
    options.memory_fraction = args.memory_fraction;
    options.fair = args.fair;
    options.compiled_marks = compiled_marks;
    if let Some(template) = &template {
        options.stop_tokens = template.stop_tokens(llama.tokenizer()?);
        options.shown_tokens = shown_tokens(template);
    }
    let engine = model::start(&llama, &options)?;

    let mut api = ApiOptions::default();
    api.api_keys.clone_from(&args.api_key);
    api.cors_origins.clone_from(&args.cors_origin);
    api.queue_timeout = args.queue_timeout.map(Duration::from_secs);
    api.request_timeout = args.request_timeout.map(Duration::from_secs);
    // Prompts are encoded beside the engine, which decodes with a tokenizer of its own.
    let tokenizer = Tokenizer::open(&dir.join("tokenizer.json"))?;
    let state = ApiState::new(engine, tokenizer, template, served(args, &llama), api)?;
    let mut connections = ServeOptions::default();
    connections.drain_timeout = Duration::from_secs(args.drain_timeout);
    connections.tls = tls;
    runtime
        .block_on(async {
            let listener = socket.listen(BACKLOG)?;
            serve(listener, state, connections, interrupted()).await
        })
        .map_err(|source| CliError::Listen { address, source })
}

/// Takes an address. Connections are refused until the socket listens.
fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // A server that is started again takes its port while old connections time out. Windows needs
    // no such option, and would share the port of another server with it.
    #[cfg(not(windows))]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// Returns the names of the model, and how it chooses tokens where a request does not say.
fn served(args: &ServeArgs, llama: &LanguageModel) -> Model {
    let given = &args.model.dir;
    let own = given.canonicalize().ok();
    let own = own.as_deref().and_then(Path::file_name);
    let own = own.map_or_else(
        || given.display().to_string(),
        |name| name.to_string_lossy().into_owned(),
    );
    let mut names = args.served_model_name.iter().cloned();
    let mut model = Model::new(names.next().unwrap_or(own));
    model.aliases = names.collect();
    let sampling = &llama.generation.sampling;
    let suppression = &llama.generation.suppression;
    // Clients of these APIs expect a temperature of 1 where a request gives none. The config of a
    // model that is greedy by default says nothing about its temperature.
    let is_greedy = sampling.temperature == 0.0;
    model.sampling = SamplingParams {
        temperature: if is_greedy { 1.0 } else { sampling.temperature },
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        suppress_tokens: suppression.suppress_tokens.clone(),
        bad_words_ids: suppression.bad_words_ids.clone(),
        min_tokens: suppression.min_new_tokens,
        ..SamplingParams::default()
    };
    model
}

/// Completes when the process is told to end.
async fn interrupted() {
    let interrupt = tokio::signal::ctrl_c();
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = interrupt => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    _ = interrupt.await;
}
