//! OpenAI- and Anthropic-compatible HTTP over an engine of `marlin-serve`.

mod auth;
mod body;
mod chat;
mod completions;
mod conversation;
mod error;
mod generate;
mod logprobs;
mod messages;
mod models;
mod options;
mod output;
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

pub use error::ApiError;
pub use options::{ApiOptions, ServeOptions};
pub use router::router;
pub use serve::serve;
pub use state::{ApiState, Model, OptionsError};
pub use tls::{TlsError, tls_config};
