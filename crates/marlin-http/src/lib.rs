//! OpenAI- and Anthropic-compatible HTTP over an engine of [`marlin_serve`].
//!
//! [`router`] returns the routes as an [`axum::Router`], to which a program can add its own, and
//! [`serve`] serves them on a listener: with limits of connections and time-outs, TLS, and a
//! shutdown that lets requests end.
//!
//! ```no_run
//! use marlin_http::{ApiOptions, ApiState, Model, ServeOptions};
//! use marlin_serve::server::ServerHandle;
//! use marlin_text::{ChatTemplate, Tokenizer};
//! use std::path::Path;
//!
//! # async fn example(engine: ServerHandle) -> Result<(), Box<dyn std::error::Error>> {
//! let dir = Path::new("Qwen3-8B-AWQ");
//! let tokenizer = Tokenizer::open(&dir.join("tokenizer.json"))?;
//! let template = ChatTemplate::open(dir)?;
//! let model = Model::new("Qwen/Qwen3-8B-AWQ");
//! let state = ApiState::new(engine, tokenizer, template, model, ApiOptions::default())?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8000").await?;
//! // The server runs until this future is ready.
//! let shutdown = std::future::pending();
//! marlin_http::serve(listener, state, ServeOptions::default(), shutdown).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # The parts of an answer
//!
//! The chat template tells how a model marks its reasoning and its calls of tools: with
//! [tags](reasoning), in one of the [formats of calls](tools::ToolFormat), or as messages of the
//! [harmony](mod@harmony) format. All APIs have them apart from the content. The engine's tokenizer
//! must show the markers, see [`shown_tokens`].
//!
//! # What is refused
//!
//! Nothing that changes an answer is ignored: a field that the server does not know, or that it or
//! the engine's executor does not support, is an error that names the field.
//!
//! | | status |
//! |---|---|
//! | a body that is not a request, a value outside its range, an unsupported field | 400 |
//! | a prompt that is too long for the model's window | 400, `context_length_exceeded` |
//! | no key, or a wrong one | 401 |
//! | an unknown model, an unknown path | 404 |
//! | a part of the two APIs that is not there, such as embeddings | 501 |
//! | a body that is too long, too slow, or not JSON by its header | 413, 408, 415 |
//! | a full waiting queue | 429 with `Retry-After` |
//! | a failure of the engine, with its reason | 500 |
//! | a shutdown, a time-out of the request | 503, 504 |
//!
//! An error after the start of a stream is its last event.
//!
//! # What is not there
//!
//! Images, audio and files; stored responses and conversations; tools that the server runs itself;
//! log probabilities of prompts; several candidates of which the best is returned (`best_of`).

mod asked;
mod auth;
mod body;
mod chat;
mod chunks;
mod completions;
mod conversation;
mod error;
mod generate;
pub mod harmony;
mod logprobs;
mod messages;
mod models;
mod options;
mod output;
mod page;
pub mod reasoning;
mod responses;
mod router;
mod sampling;
mod serve;
mod sse;
mod state;
mod status;
mod structure;
mod tls;
mod tokenize;
pub mod tools;

pub use body::check_body;
pub use error::ApiError;
pub use options::{ApiOptions, ServeOptions};
pub use output::shown_tokens;
pub use router::router;
pub use serve::serve;
pub use state::{ApiState, Model, OptionsError};
pub use tls::{TlsError, tls_config};
