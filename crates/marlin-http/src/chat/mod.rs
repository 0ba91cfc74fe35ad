//! `/v1/chat/completions`.

mod request;
mod stream;

pub(crate) use self::request::{ChatJob, priority};
use self::stream::ChatForm;
use crate::auth::Client;
use crate::body::Checked;
use crate::chunks::ChunkWriter;
use crate::error::{ApiError, json};
use crate::generate::Reply;
use crate::logprobs::Vocabulary;
use crate::output::Call;
use crate::sse;
use crate::state::ApiState;
use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use openai_protocol::chat::{
    ChatChoice, ChatCompletionMessage, ChatCompletionRequest, ChatCompletionResponse,
    DEFAULT_SERVICE_TIER,
};
use openai_protocol::common::{FunctionCallResponse, ToolCall};

/// Answers `POST /v1/chat/completions`.
pub(crate) async fn create(
    State(state): State<ApiState>,
    Extension(client): Extension<Client>,
    Checked(request): Checked<ChatCompletionRequest>,
) -> Result<Response, ApiError> {
    state.check_model(&request.model)?;
    let job = ChatJob::read(request)?;
    let vocabulary = state.vocabulary(job.logprobs).await?;
    let answers = state.generate(job.asked.job(&state, client).await?)?;
    let (id, created, model) = (state.new_id("chatcmpl-"), state.now(), job.model);
    if let Some(options) = job.stream {
        let form = ChatForm::new(id, created, model, answers.len());
        let writer = ChunkWriter::new(form, &answers, options, vocabulary);
        return Ok(sse::respond(answers, writer));
    }
    let (replies, usage) = answers.collect().await?;
    let choices = replies.into_iter().enumerate();
    let choices = choices.map(|(index, reply)| choice(index, reply, vocabulary.as_deref()));
    Ok(json(&ChatCompletionResponse {
        id,
        object: "chat.completion".into(),
        created,
        model,
        choices: choices.collect(),
        usage: Some(usage.openai()),
        system_fingerprint: None,
        service_tier: DEFAULT_SERVICE_TIER.into(),
    }))
}

/// Returns a whole answer.
fn choice(index: usize, reply: Reply, vocabulary: Option<&Vocabulary>) -> ChatChoice {
    let parts = reply.parts;
    let calls = parts.calls.into_iter().map(tool_call).collect::<Vec<_>>();
    let has_calls = !calls.is_empty();
    ChatChoice {
        index: index as u32,
        message: ChatCompletionMessage {
            role: "assistant".into(),
            content: (!has_calls || !parts.content.is_empty()).then_some(parts.content),
            refusal: None,
            annotations: Vec::new(),
            tool_calls: has_calls.then_some(calls),
            reasoning_content: (!parts.reasoning.is_empty()).then_some(parts.reasoning),
        },
        logprobs: vocabulary.map(|vocabulary| vocabulary.chat(&reply.logprobs)),
        finish_reason: Some(reply.finish.openai(has_calls).into()),
        matched_stop: reply.finish.matched_stop(),
        hidden_states: None,
    }
}

/// Returns a call of a tool in OpenAI's form.
fn tool_call(call: Call) -> ToolCall {
    ToolCall {
        id: call.id,
        tool_type: "function".into(),
        function: FunctionCallResponse {
            name: call.name,
            arguments: Some(call.arguments),
        },
    }
}
