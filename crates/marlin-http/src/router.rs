//! The routes of the API, and what every request passes.

use crate::error::{ApiError, failure};
use crate::state::ApiState;
use crate::{auth, chat, completions, messages, models, page, responses, status, tokenize};
use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use std::any::Any;
use std::time::{Duration, Instant};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use tracing::Instrument;
use uuid::Uuid;

/// The header with the number of a request.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The most bytes of a client's own number of a request.
const MAX_REQUEST_ID: usize = 128;
/// The longest time that a browser remembers the answer about an origin.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);

/// Parts of OpenAI's and Anthropic's APIs that answer 501.
const NOT_IMPLEMENTED: [&str; 20] = [
    "/v1/assistants",
    "/v1/audio",
    "/v1/batches",
    "/v1/chat/completions",
    "/v1/containers",
    "/v1/conversations",
    "/v1/embeddings",
    "/v1/evals",
    "/v1/files",
    "/v1/fine_tuning",
    "/v1/images",
    "/v1/messages",
    "/v1/moderations",
    "/v1/realtime",
    "/v1/responses",
    "/v1/threads",
    "/v1/uploads",
    "/v1/vector_stores",
    "/v1/videos",
    "/v1/webhooks",
];

/// Returns the routes of the API.
///
/// | route | |
/// |---|---|
/// | `POST /v1/chat/completions` | chat completions of OpenAI's API |
/// | `POST /v1/completions` | text completions of OpenAI's API |
/// | `POST /v1/responses` | responses of OpenAI's API, without storage |
/// | `POST /v1/messages` | messages of Anthropic's API |
/// | `POST /v1/messages/count_tokens` | the tokens of a message's prompt |
/// | `GET /v1/models`, `GET /v1/models/MODEL` | the served model |
/// | `POST /tokenize`, `POST /detokenize` | tokens of a text or conversation, and back |
/// | `GET /server_info`, `GET /model_info` | name and limits of the server, for SGLang's router |
/// | `GET /health` | 200, or 503 with the reason |
/// | `GET /metrics` | the figures of the engine, under vLLM's names, for Prometheus |
/// | `GET /version` | the version of this crate |
/// | `GET /` | a page with a chat and a live view of the server |
///
/// Other routes of the two APIs answer 501, all other paths 404. Only `/health`, `/metrics`,
/// `/version` and the page are open to clients without a key. Every error has the form of OpenAI's
/// API, below `/v1/messages` that of Anthropic's.
pub fn router(state: ApiState) -> Router {
    let mut closed = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::get))
        .route("/server_info", get(status::server_info))
        .route("/model_info", get(status::model_info))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize));
    for path in NOT_IMPLEMENTED {
        closed = closed.route(&format!("{path}/{{*rest}}"), any(not_implemented));
        if !matches!(
            path,
            "/v1/chat/completions" | "/v1/messages" | "/v1/responses"
        ) {
            closed = closed.route(path, any(not_implemented));
        }
    }
    closed
        .layer(from_fn_with_state(state.clone(), auth::check))
        .route("/health", get(status::health))
        .route("/metrics", get(status::metrics))
        .route("/version", get(status::version))
        .merge(page::routes())
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn(observe))
        .layer(cors(&state.options().cors_origins))
        .with_state(state)
}

async fn not_implemented(uri: Uri) -> ApiError {
    let path = uri.path().into();
    ApiError::NotImplemented { path }
}

async fn not_found(uri: Uri) -> ApiError {
    let path = uri.path().into();
    ApiError::RouteNotFound { path }
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    ApiError::MethodNotAllowed {
        path: uri.path().into(),
        method: method.to_string(),
    }
}

fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
    tracing::error!(panic = message, "a handler panicked");
    ApiError::Engine("The server failed; its log says why.".into()).into_response()
}

/// Numbers and logs a request, and writes an error in the form of the path's API.
async fn observe(request: Request, next: Next) -> Response {
    let id = request_id(&request);
    let (method, path) = (request.method().clone(), request.uri().path().to_string());
    let span = tracing::info_span!("request", %id, %method, path);
    let start = Instant::now();
    async move {
        let mut response = next.run(request).await;
        if let Some(error) = response.extensions_mut().remove::<ApiError>() {
            let status = error.status();
            if status.is_server_error() {
                tracing::error!(status = status.as_u16(), %error, "refused");
            } else {
                tracing::debug!(status = status.as_u16(), %error, "refused");
            }
            let allow = response.headers_mut().remove(header::ALLOW);
            response = error.respond(&path, &id);
            if let Some(allow) = allow {
                response.headers_mut().insert(header::ALLOW, allow);
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        tracing::info!(status = response.status().as_u16(), seconds, "answered");
        match HeaderValue::from_str(&id) {
            Ok(id) => {
                response.headers_mut().insert(REQUEST_ID, id);
                response
            }
            Err(error) => failure(error),
        }
    }
    .instrument(span)
    .await
}

/// Returns the client's own number of a request if it is short and of printable characters, else a
/// new one.
fn request_id(request: &Request) -> String {
    let own = request.headers().get(REQUEST_ID);
    let own = own.and_then(|id| id.to_str().ok());
    match own.filter(|id| !id.is_empty() && id.len() <= MAX_REQUEST_ID) {
        Some(id) => id.into(),
        None => format!("req_{}", Uuid::new_v4().simple()),
    }
}

/// Lets pages of other origins ask.
fn cors(origins: &[String]) -> CorsLayer {
    let layer = CorsLayer::new();
    if origins.is_empty() {
        return layer;
    }
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| origin.parse().ok()))
    };
    layer
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        // `*` would not let a page send its key.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID])
        .max_age(PREFLIGHT_AGE)
}
