//! Bodies of requests: JSON of a bounded length, in a bounded time.

use crate::chat::ChatJob;
use crate::completions;
use crate::error::ApiError;
use crate::messages::{MessageJob, count_conversation};
use crate::responses::ResponseJob;
use crate::state::ApiState;
use crate::tokenize::{DetokenizeRequest, TokenizeRequest};
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
        validated(value)
            .map(Self)
            .map_err(IntoResponse::into_response)
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
    parse(&body.to_bytes())
}

/// Checks the body of a `POST` request as its route does before it asks the engine. `path` is that
/// of a route of the [router](crate::router), such as `/v1/chat/completions`.
///
/// What depends on the model is not checked: its name, the length of the prompt, the tokens.
///
/// # Errors
/// If the route would refuse the body, or there is no route that takes one.
pub fn check_body(path: &str, body: &[u8]) -> Result<(), ApiError> {
    match path {
        "/v1/chat/completions" => ChatJob::read(validated(parse(body)?)?).map(drop),
        "/v1/completions" => completions::check(parse(body)?),
        "/v1/responses" => ResponseJob::read(validated(parse(body)?)?).map(drop),
        "/v1/messages" => MessageJob::read(validated(parse(body)?)?).map(drop),
        "/v1/messages/count_tokens" => count_conversation(validated(parse(body)?)?).map(drop),
        "/tokenize" => parse::<TokenizeRequest>(body)?.source().map(drop),
        "/detokenize" => parse::<DetokenizeRequest>(body).map(drop),
        path => Err(ApiError::RouteNotFound { path: path.into() }),
    }
}

/// Reads JSON.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| ApiError::json(&error))
}

/// Returns a value if its fields are in their ranges.
pub(crate) fn validated<T: Validate>(value: T) -> Result<T, ApiError> {
    match value.validate() {
        Ok(()) => Ok(value),
        Err(errors) => Err(ApiError::validation(&errors)),
    }
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
