//! Options of the API and of its connections.

use rustls::ServerConfig;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Options of the API.
#[derive(Clone)]
#[non_exhaustive]
pub struct ApiOptions {
    /// The keys of clients; without any, every client may ask.
    pub api_keys: Vec<String>,
    /// The origins whose pages may ask, such as `https://example.com`; `*` is every origin.
    pub cors_origins: Vec<String>,
    /// The most bytes of a body.
    pub max_body_bytes: usize,
    /// The longest time until a body is complete.
    pub body_timeout: Duration,
    /// The most completions for one request: prompts times `n`.
    pub max_choices: usize,
    /// The longest time until a request leaves the waiting queue; not limited if `None`.
    pub queue_timeout: Option<Duration>,
    /// The longest time until a request ends; not limited if `None`.
    pub request_timeout: Option<Duration>,
}

/// Writes how many keys there are, not which.
impl fmt::Debug for ApiOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ApiOptions")
            .field("api_keys", &self.api_keys.len())
            .field("cors_origins", &self.cors_origins)
            .field("max_body_bytes", &self.max_body_bytes)
            .field("body_timeout", &self.body_timeout)
            .field("max_choices", &self.max_choices)
            .field("queue_timeout", &self.queue_timeout)
            .field("request_timeout", &self.request_timeout)
            .finish()
    }
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            api_keys: Vec::new(),
            cors_origins: Vec::new(),
            max_body_bytes: 8 << 20,
            body_timeout: Duration::from_secs(30),
            max_choices: 64,
            queue_timeout: None,
            request_timeout: None,
        }
    }
}

/// Options of the connections of [`serve`](crate::serve).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServeOptions {
    /// The most connections at a time. Further ones wait until another ends.
    pub max_connections: usize,
    /// The longest time until the head of a request is complete, also the longest time that a
    /// connection stays open without a request, and that a TLS handshake takes.
    pub header_timeout: Duration,
    /// The longest time that a client takes no data of an answer.
    pub write_timeout: Duration,
    /// The longest time that the requests in progress may take after the shutdown began.
    pub drain_timeout: Duration,
    /// The certificate and key of TLS, see [`tls_config`](crate::tls_config); plain HTTP if `None`.
    pub tls: Option<Arc<ServerConfig>>,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            max_connections: 4096,
            header_timeout: Duration::from_secs(15),
            write_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(30),
            tls: None,
        }
    }
}
