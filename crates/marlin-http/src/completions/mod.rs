//! `/v1/completions`.

mod request;
mod stream;

use self::request::CompletionJob;
use self::stream::CompletionForm;
use crate::auth::Client;
use crate::body::Json;
use crate::chunks::ChunkWriter;
use crate::error::{ApiError, json};
use crate::generate::Reply;
use crate::sse;
use crate::state::ApiState;
use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use openai_protocol::completion::{CompletionChoice, CompletionResponse};
use serde_json::{Map, Value};

/// Answers `POST /v1/completions`.
pub(crate) async fn create(
    State(state): State<ApiState>,
    Extension(client): Extension<Client>,
    Json(body): Json<Map<String, Value>>,
) -> Result<Response, ApiError> {
    let job = CompletionJob::new(&state, body, client).await?;
    let vocabulary = state.vocabulary(job.logprobs).await?;
    let echoes = job.echoes();
    let answers = state.generate(job.job)?;
    let (id, created, model) = (state.new_id("cmpl-"), state.now(), job.model);
    if let Some(options) = job.stream {
        let form = CompletionForm::new(id, created, model, echoes);
        let writer = ChunkWriter::new(form, &answers, options, vocabulary);
        return Ok(sse::respond(answers, writer));
    }
    let (replies, usage) = answers.collect().await?;
    let replies = replies.into_iter().zip(echoes).enumerate();
    let choices = replies.map(|(index, (reply, echo))| {
        let mut offset = echo.chars().count() as u32;
        let logprobs = vocabulary.as_deref();
        CompletionChoice {
            logprobs: logprobs.map(|tokens| tokens.completion(&reply.logprobs, &mut offset)),
            ..choice(index, reply, echo)
        }
    });
    Ok(json(&CompletionResponse {
        id,
        object: "text_completion".into(),
        created,
        model,
        choices: choices.collect(),
        usage: Some(usage.openai()),
        system_fingerprint: None,
    }))
}

/// Checks a request as far as its body tells.
pub(crate) fn check(body: Map<String, Value>) -> Result<(), ApiError> {
    let (request, _) = request::read(body)?;
    request::check(&request).map(drop)
}

/// Returns a whole answer. `echo` is the text before it.
fn choice(index: usize, reply: Reply, echo: String) -> CompletionChoice {
    CompletionChoice {
        text: echo + &reply.parts.content,
        index: index as u32,
        logprobs: None,
        finish_reason: Some(reply.finish.openai(false).into()),
        matched_stop: reply.finish.matched_stop(),
    }
}
