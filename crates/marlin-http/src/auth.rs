//! API keys.

use crate::error::ApiError;
use crate::state::ApiState;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

/// The keys of a server, as digests: the time of a comparison says nothing about a key.
#[derive(Debug)]
pub(crate) struct Keys(Vec<[u8; 32]>);

/// Who asks: the number of the client's key, from 1; 0 on a server without keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client(pub u64);

impl Keys {
    pub fn new(keys: &[String]) -> Self {
        Self(keys.iter().map(|key| digest(key.as_bytes())).collect())
    }

    /// Returns who sent the headers; `None` if they have no key of the server.
    fn client(&self, headers: &HeaderMap) -> Option<Client> {
        if self.0.is_empty() {
            return Some(Client(0));
        }
        let bearer = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| bearer(value.as_bytes()));
        let key = bearer.or_else(|| Some(headers.get("x-api-key")?.as_bytes()))?;
        let key = digest(key);
        let index = self.0.iter().position(|known| *known == key)?;
        Some(Client(index as u64 + 1))
    }
}

/// Refuses requests without a key of the server, and tells the others' handlers who asks.
pub(crate) async fn check(
    State(state): State<ApiState>,
    mut request: Request,
    next: Next,
) -> Response {
    match state.keys().client(request.headers()) {
        Some(client) => {
            request.extensions_mut().insert(client);
            next.run(request).await
        }
        None => ApiError::Unauthorized.into_response(),
    }
}

/// Returns the token of an `Authorization` header of the scheme `Bearer`.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| token.trim_ascii())
}

fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}
