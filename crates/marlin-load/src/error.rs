//! What stops a load test, and how one request fails.

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use std::net::IpAddr;
use std::time::Duration;

/// A load test could not run.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// An option without a meaning.
    #[error("the option `{option}`: {reason}")]
    Option {
        /// The field of `LoadOptions`.
        option: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The base URL cannot be used.
    #[error("the base URL `{url}`: {reason}; it is to be like `http://127.0.0.1:8000`")]
    Url {
        /// The URL.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// The server is not on this machine, and
    /// [`LoadOptions::allow_remote`](crate::LoadOptions::allow_remote) is not set.
    #[error(
        "{host} has the address {address}, which is no loopback address, and a load test of a server of others is an attack; `allow_remote` says that this one may be tested"
    )]
    Remote {
        /// The host of the base URL.
        host: String,
        /// The address of the host.
        address: IpAddr,
    },
    /// The threads could not be started.
    #[error("the threads of the load generator: {0}")]
    Runtime(#[from] std::io::Error),
    /// A request before the measurement failed.
    #[error("{path}, before the measurement: {failure}")]
    Setup {
        /// The path of the endpoint.
        path: &'static str,
        /// How it failed.
        failure: Failure,
    },
    /// `/v1/models` has no model.
    #[error("/v1/models lists no model; name one, or check the base URL")]
    NoModel,
    /// The plot could not be drawn.
    #[error("the plot: {0}")]
    Plot(String),
}

/// How a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The connection failed.
    #[error("no connection: {0}")]
    Connect(String),
    /// The status of the answer was not 200.
    #[error("status {status}: {message}")]
    Status {
        /// The status of HTTP.
        status: u16,
        /// The start of the body.
        message: String,
    },
    /// The answer was not complete in time.
    #[error("not complete after {0:?}")]
    Timeout(Duration),
    /// The connection broke, or the stream ended before `[DONE]`.
    #[error("broken stream: {0}")]
    Broken(String),
    /// An event or an answer that is not of the API.
    #[error("malformed answer: {0}")]
    Malformed(String),
    /// The server reported an error in the stream.
    #[error("error in the stream: {0}")]
    Reported(String),
    /// The stream ended without a token.
    #[error("the stream ended without a token")]
    NoToken,
}

impl Failure {
    /// Returns the name under which failures are counted.
    pub fn kind(&self) -> String {
        match self {
            Self::Connect(_) => "no connection".into(),
            Self::Status { status, .. } => format!("status {status}"),
            Self::Timeout(_) => "timeout".into(),
            Self::Broken(_) => "broken stream".into(),
            Self::Malformed(_) => "malformed answer".into(),
            Self::Reported(_) => "error in the stream".into(),
            Self::NoToken => "no token".into(),
        }
    }
}

impl Serialize for Failure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Failure", 2)?;
        fields.serialize_field("kind", &self.kind())?;
        fields.serialize_field("message", &self.to_string())?;
        fields.end()
    }
}
