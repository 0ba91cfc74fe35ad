//! `/v1/models`.

use crate::error::{ApiError, json};
use crate::state::ApiState;
use axum::extract::{Path, State};
use axum::response::Response;
use openai_protocol::models::ModelObject;
use serde::Serialize;

/// A model with the length of its window, which vLLM's clients read.
#[derive(Serialize)]
struct Model {
    #[serde(flatten)]
    object: ModelObject,
    max_model_len: usize,
}

/// Answers `GET /v1/models`.
pub(crate) async fn list(State(state): State<ApiState>) -> Response {
    // The library's list has no place for `max_model_len`.
    json(&serde_json::json!({
        "object": "list",
        "data": state.model().names().map(|name| model(&state, name)).collect::<Vec<_>>(),
    }))
}

/// Answers `GET /v1/models/MODEL`.
pub(crate) async fn get(
    State(state): State<ApiState>,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    state.check_model(&name)?;
    Ok(json(&model(&state, &name)))
}

fn model(state: &ApiState, name: &str) -> Model {
    Model {
        object: ModelObject {
            id: name.into(),
            object: "model".into(),
            created: state.started() as i64,
            owned_by: "burn-marlin".into(),
        },
        max_model_len: state.window(),
    }
}
