//! Bodies of requests: JSON of a bounded length, in a bounded time.

use crate::error::ApiError;
use crate::state::ApiState;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use validator::Validate;

/// A body of JSON, with the checks of its fields.
pub(crate) struct Checked<T>(pub T);

/// A body of JSON.
pub(crate) struct Json<T>(pub T);

impl<T: DeserializeOwned + Validate> FromRequest<ApiState> for Checked<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &ApiState) -> Result<Self, Response> {
        let Json(value): Json<T> = Json::from_request(request, state).await?;
        match value.validate() {
            Ok(()) => Ok(Self(value)),
            Err(errors) => Err(ApiError::validation(&errors).into_response()),
        }
    }
}

impl<T: DeserializeOwned> FromRequest<ApiState> for Json<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &ApiState) -> Result<Self, Response> {
        read(request, state)
            .await
            .map(Self)
            .map_err(IntoResponse::into_response)
    }
}

/// Reads the body of a request.
async fn read<T: DeserializeOwned>(request: Request, state: &ApiState) -> Result<T, ApiError> {
    let options = state.options();
    let limit = options.max_body_bytes;
    // A page of another origin can send other types without asking the server first.
    if !is_json(request.headers()) {
        return Err(ApiError::MediaType);
    }
    if announced_length(request.headers()).is_some_and(|length| length > limit as u64) {
        return Err(ApiError::BodyTooLarge { limit });
    }
    let body = Limited::new(request.into_body(), limit).collect();
    let body = tokio::time::timeout(options.body_timeout, body)
        .await
        .map_err(|_| ApiError::BodyTimeout(options.body_timeout))?
        .map_err(|error| match error.downcast::<LengthLimitError>() {
            Ok(_) => ApiError::BodyTooLarge { limit },
            Err(error) => ApiError::BodyRead(error.to_string()),
        })?;
    serde_json::from_slice(&body.to_bytes()).map_err(|error| ApiError::json(&error))
}

/// Returns true if the headers announce JSON.
fn is_json(headers: &HeaderMap) -> bool {
    let media_type = headers.get(header::CONTENT_TYPE);
    media_type
        .and_then(|value| value.to_str().ok()?.split(';').next())
        .is_some_and(|value| value.trim().eq_ignore_ascii_case("application/json"))
}

/// Returns the length of the body that the headers announce.
fn announced_length(headers: &HeaderMap) -> Option<u64> {
    headers
        .get(header::CONTENT_LENGTH)?
        .to_str()
        .ok()?
        .parse()
        .ok()
}
