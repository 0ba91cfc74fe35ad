//! Errors of the API, in the forms that OpenAI's and Anthropic's clients read.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use marlin_text::TextError;
use openai_protocol::{common, messages};
use serde::Serialize;
use std::fmt::Display;
use std::time::Duration;
use validator::{ValidationErrors, ValidationErrorsKind};

/// The reason why a request is not answered as it asks.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// A body that is not JSON, or a field with a value that it cannot have.
    #[error("{message}")]
    Invalid {
        /// What is wrong.
        message: String,
        /// The field.
        param: Option<String>,
        /// The name of the error in OpenAI's API.
        code: &'static str,
    },
    /// A field that this server, or the model's executor, does not support.
    #[error("{message}")]
    Unsupported {
        /// What is not supported.
        message: String,
        /// The field.
        param: Option<String>,
    },
    /// A prompt that leaves no room for an answer in the model's window.
    #[error(
        "This model's maximum context length is {window} tokens. However, you requested {prompt} \
         tokens in the prompt and {completion} for the completion. Please reduce the length of the \
         prompt or of the completion."
    )]
    ContextLength {
        /// The positions of the model's window.
        window: usize,
        /// The tokens of the prompt.
        prompt: usize,
        /// The tokens that the completion asks for, at least 1.
        completion: usize,
    },
    /// No API key, or one that the server does not have.
    #[error(
        "Incorrect API key provided. Send a key of this server as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    )]
    Unauthorized,
    /// A model that is not served here.
    #[error("The model `{model}` does not exist. This server has `{served}`.")]
    ModelNotFound {
        /// The model that was asked for.
        model: String,
        /// The model that is served.
        served: String,
    },
    /// A path without a route.
    #[error("There is no route {path}.")]
    RouteNotFound {
        /// The path.
        path: String,
    },
    /// A route that does not take the request's method.
    #[error("{path} does not take {method}.")]
    MethodNotAllowed {
        /// The path.
        path: String,
        /// The method.
        method: String,
    },
    /// A route of OpenAI's or Anthropic's API that this server does not have.
    #[error("{path} is not implemented by this server.")]
    NotImplemented {
        /// The path.
        path: String,
    },
    /// A body without `Content-Type: application/json`.
    #[error("The body must be sent with `Content-Type: application/json`.")]
    MediaType,
    /// A body that is longer than the server takes.
    #[error("The body has more than {limit} bytes.")]
    BodyTooLarge {
        /// The most bytes of a body.
        limit: usize,
    },
    /// A body that did not arrive in time.
    #[error("The body did not arrive within {} s.", .0.as_secs_f64())]
    BodyTimeout(Duration),
    /// A body that ended early.
    #[error("The body could not be read: {0}")]
    BodyRead(String),
    /// A waiting queue that is full.
    #[error("The server is at its limit of waiting requests. Try again later.")]
    Busy,
    /// A server that is ending.
    #[error("The server is shutting down.")]
    ShuttingDown,
    /// A request that was not complete in time.
    #[error("{0}")]
    Timeout(String),
    /// A request that the engine could not compute.
    #[error("{0}")]
    Engine(String),
}

impl ApiError {
    /// An invalid value of a field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid {
            message: message.into(),
            param: Some(param.into()),
            code: "invalid_value",
        }
    }

    /// A field that is not supported.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Unsupported {
            message: message.into(),
            param: Some(param.into()),
        }
    }

    /// A body that is not JSON, or not of the request's form.
    pub(crate) fn json(error: &serde_json::Error) -> Self {
        let code = if error.is_data() {
            "invalid_type"
        } else {
            "invalid_json"
        };
        Self::Invalid {
            message: format!("The body is not a valid request: {error}"),
            param: None,
            code,
        }
    }

    /// Values outside of their ranges. Names the first field, in the order of their names.
    pub(crate) fn validation(errors: &ValidationErrors) -> Self {
        let (param, message) = first_error(errors);
        Self::Invalid {
            message,
            param,
            code: "invalid_value",
        }
    }

    /// The status of the response.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } | Self::Unsupported { .. } | Self::ContextLength { .. } => {
                StatusCode::BAD_REQUEST
            }
            Self::BodyRead(_) => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::ModelNotFound { .. } | Self::RouteNotFound { .. } => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::NotImplemented { .. } => StatusCode::NOT_IMPLEMENTED,
            Self::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Busy => StatusCode::TOO_MANY_REQUESTS,
            Self::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
            Self::Timeout(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Engine(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The field that the error is about.
    fn param(&self) -> Option<&str> {
        match self {
            Self::Invalid { param, .. } | Self::Unsupported { param, .. } => param.as_deref(),
            Self::ModelNotFound { .. } => Some("model"),
            _ => None,
        }
    }

    /// The error's `code` in OpenAI's form.
    fn code(&self) -> &'static str {
        match self {
            Self::Invalid { code, .. } => code,
            Self::Unsupported { .. } => "unsupported_parameter",
            Self::ContextLength { .. } => "context_length_exceeded",
            Self::Unauthorized => "invalid_api_key",
            Self::ModelNotFound { .. } => "model_not_found",
            Self::RouteNotFound { .. } => "unknown_url",
            Self::MethodNotAllowed { .. } => "method_not_allowed",
            Self::NotImplemented { .. } => "not_implemented",
            Self::MediaType => "unsupported_media_type",
            Self::BodyTooLarge { .. } => "body_too_large",
            Self::BodyTimeout(_) => "body_timeout",
            Self::BodyRead(_) => "body_incomplete",
            Self::Busy => "rate_limit_exceeded",
            Self::ShuttingDown => "shutting_down",
            Self::Timeout(_) => "timeout",
            Self::Engine(_) => "engine_error",
        }
    }

    /// The error as the body of a response of OpenAI's API.
    pub(crate) fn openai(&self) -> common::ErrorResponse {
        let error_type = match self.status() {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        common::ErrorResponse {
            error: common::ErrorDetail {
                message: self.to_string(),
                error_type: error_type.into(),
                param: self.param().map(Into::into),
                code: Some(self.code().into()),
            },
        }
    }

    /// The error as Anthropic's API has it in a response and in an event.
    pub(crate) fn anthropic(&self) -> messages::ErrorResponse {
        let error_type = match self.status() {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        let message = match self.param() {
            Some(param) => format!("{param}: {self}"),
            None => self.to_string(),
        };
        messages::ErrorResponse {
            error_type: error_type.into(),
            message,
        }
    }

    /// Writes the response in the form of the API that `path` belongs to.
    pub(crate) fn respond(&self, path: &str, request_id: &str) -> Response {
        let mut response = if path.starts_with("/v1/messages") {
            json(&messages::ErrorEnvelope::new(self.anthropic(), request_id))
        } else {
            json(&self.openai())
        };
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        match self {
            Self::Busy => _ = headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1")),
            Self::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            // The rest of the body is not read.
            Self::BodyTooLarge { .. } | Self::BodyTimeout(_) | Self::BodyRead(_) => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}

/// Returns a response with an object as JSON.
pub(crate) fn json(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => (
            [(header::CONTENT_TYPE, "application/json")],
            Body::from(body),
        )
            .into_response(),
        Err(error) => failure(error),
    }
}

/// An error of the server itself.
pub(crate) fn failure(error: impl Display) -> Response {
    ApiError::Engine(format!("The answer could not be written: {error}")).into_response()
}

/// Hands the error to the [middleware](crate::router) that writes it in the form of the path's API.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status().into_response();
        response.extensions_mut().insert(self);
        response
    }
}

impl From<TextError> for ApiError {
    /// A prompt or a conversation that the tokenizer or the template refuses.
    fn from(error: TextError) -> Self {
        let mut message = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            message += &format!(": {error}");
            cause = error.source();
        }
        match error {
            TextError::ChatTemplate { .. } => Self::Invalid {
                message: format!("The conversation is refused by {message}"),
                param: Some("messages".into()),
                code: "invalid_value",
            },
            TextError::TokenOutsideVocabulary { .. } => Self::Invalid {
                message,
                param: None,
                code: "invalid_value",
            },
            _ => Self::Engine(message),
        }
    }
}

/// Returns the path and the message of the first error, in the order of the fields' names.
fn first_error(errors: &ValidationErrors) -> (Option<String>, String) {
    let mut fields: Vec<_> = errors.errors().iter().collect();
    fields.sort_by(|a, b| a.0.cmp(b.0));
    let Some((field, kind)) = fields.first() else {
        return (None, "The request is not valid.".into());
    };
    // The checks of several fields together have no field.
    let name = (field.as_ref() != "__all__").then(|| field.to_string());
    match kind {
        ValidationErrorsKind::Field(errors) => {
            let Some(error) = errors.first() else {
                return (name, "The value is not valid.".into());
            };
            let message = match (&error.message, &name) {
                (Some(message), _) => message.to_string(),
                (None, Some(name)) => {
                    let bound = |key| error.params.get(key).map(ToString::to_string);
                    let value = bound("value").unwrap_or_default();
                    let range = match (bound("min"), bound("max")) {
                        (Some(min), Some(max)) => format!("; it must be from {min} to {max}"),
                        (Some(min), None) => format!("; it must be at least {min}"),
                        (None, Some(max)) => format!("; it must be at most {max}"),
                        (None, None) => String::new(),
                    };
                    format!("Invalid value {value} of `{name}`{range}.")
                }
                (None, None) => error.code.to_string(),
            };
            (name, message)
        }
        ValidationErrorsKind::Struct(errors) => first_error(errors),
        ValidationErrorsKind::List(list) => match list.first_key_value() {
            Some((_, errors)) => first_error(errors),
            None => (name, "The list is not valid.".into()),
        },
    }
}
