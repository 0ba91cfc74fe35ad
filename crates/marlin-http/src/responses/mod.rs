//! `/v1/responses` of OpenAI's API. Nothing is stored: a conversation is sent whole.

mod item;
mod request;
mod stream;

use self::request::ResponseJob;
use self::stream::ResponseWriter;
use crate::auth::Client;
use crate::body::Checked;
use crate::error::{ApiError, json};
use crate::generate::{Counts, Finish};
use crate::sse;
use crate::state::ApiState;
use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use openai_protocol::responses::{
    IncompleteDetails, IncompleteReason, ResponseStatus, ResponsesRequest, ResponsesResponse,
    ResponsesUsage,
};

/// Answers `POST /v1/responses`.
pub(crate) async fn create(
    State(state): State<ApiState>,
    Extension(client): Extension<Client>,
    Checked(request): Checked<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let mut response = ResponsesResponse::builder(state.new_id("resp_"), &request.model)
        .copy_from_request(&request)
        .created_at(state.now().cast_signed())
        .status(ResponseStatus::InProgress)
        .store(false)
        .build();
    let ResponseJob { job, stream } = ResponseJob::new(&state, request, client).await?;
    let answers = state.generate(job)?;
    if stream {
        return Ok(sse::respond(answers, ResponseWriter::new(response)));
    }
    let (replies, counts) = answers.collect().await?;
    for reply in replies {
        let status = finish(&mut response, &reply.finish, counts, state.now());
        response.output = item::items(&state, reply.parts, status);
    }
    Ok(json(&response))
}

/// Sets the status and the usage of a response whose answer is complete. Returns the status of its
/// last item.
fn finish(
    response: &mut ResponsesResponse,
    finish: &Finish,
    counts: Counts,
    now: u64,
) -> &'static str {
    response.usage = Some(ResponsesUsage::Modern((&counts.openai()).into()));
    response.completed_at = Some(now.cast_signed());
    if *finish != Finish::Length {
        response.status = ResponseStatus::Completed;
        return item::COMPLETED;
    }
    response.status = ResponseStatus::Incomplete;
    response.incomplete_details = Some(IncompleteDetails {
        reason: IncompleteReason::MaxOutputTokens,
    });
    item::INCOMPLETE
}
