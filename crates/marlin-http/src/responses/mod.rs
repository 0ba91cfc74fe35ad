//! `/v1/responses` of OpenAI's API. Nothing is stored: a conversation is sent whole.

mod item;
mod request;
mod stream;

pub(crate) use self::request::ResponseJob;
use self::stream::ResponseWriter;
use crate::auth::Client;
use crate::body::Checked;
use crate::error::{ApiError, json};
use crate::generate::{Counts, Finish, Update};
use crate::logprobs::ContentLogprobs;
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
    state.check_model(&request.model)?;
    let mut response = ResponsesResponse::builder(state.new_id("resp_"), &request.model)
        .copy_from_request(&request)
        .created_at(state.now().cast_signed())
        .status(ResponseStatus::InProgress)
        .store(false)
        .build();
    let job = ResponseJob::read(request)?;
    job.check_logprobs(&state)?;
    let ResponseJob {
        asked,
        logprobs,
        stream,
    } = job;
    let vocabulary = state.vocabulary(logprobs).await?;
    let ends = &state.engine().options().eos_tokens;
    let mut of_content =
        vocabulary.map(|vocabulary| ContentLogprobs::new(vocabulary, ends.clone()));
    let answers = state.generate(asked.job(&state, client).await?)?;
    if stream {
        let writer = ResponseWriter::new(response, of_content);
        return Ok(sse::respond(answers, writer));
    }
    let mut logprobs = of_content.is_some().then(Vec::new);
    let see = |update: &Update| {
        if let (Some(of_content), Some(logprobs)) = (&mut of_content, &mut logprobs) {
            logprobs.extend(of_content.of_update(update));
        }
    };
    let (replies, counts) = answers.collect_with(see).await?;
    for reply in replies {
        let status = finish(&mut response, &reply.finish, counts, state.now());
        response.output = item::items(&state, reply.parts, logprobs.take(), status);
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
