//! `/v1/messages` of Anthropic's API.

mod request;
mod stream;

pub(crate) use self::request::{MessageJob, count_conversation};
use self::stream::MessageWriter;
use crate::auth::Client;
use crate::body::Checked;
use crate::error::{ApiError, json};
use crate::generate::{Counts, Finish, Reply};
use crate::sse;
use crate::state::ApiState;
use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use openai_protocol::messages::{
    ContentBlock, CountMessageTokensRequest, CountMessageTokensResponse, CreateMessageRequest,
    Message, StopReason, ToolUseCaller, Usage,
};
use serde_json::Value;

/// Answers `POST /v1/messages`.
pub(crate) async fn create(
    State(state): State<ApiState>,
    Extension(client): Extension<Client>,
    Checked(request): Checked<CreateMessageRequest>,
) -> Result<Response, ApiError> {
    state.check_model(&request.model)?;
    let MessageJob {
        asked,
        model,
        stream,
    } = MessageJob::read(request)?;
    let answers = state.generate(asked.job(&state, client).await?)?;
    let id = state.new_id("msg_");
    if stream {
        let prompt = answers.total().counts;
        return Ok(sse::respond(
            answers,
            MessageWriter::new(message(id, model, prompt)),
        ));
    }
    let (replies, counts) = answers.collect().await?;
    let mut message = message(id, model, counts);
    for reply in replies {
        finish(&mut message, reply);
    }
    Ok(json(&message))
}

/// Answers `POST /v1/messages/count_tokens`.
pub(crate) async fn count_tokens(
    State(state): State<ApiState>,
    Checked(request): Checked<CountMessageTokensRequest>,
) -> Result<Response, ApiError> {
    state.check_model(&request.model)?;
    let conversation = count_conversation(request)?;
    let prompt = state.encode(conversation).await?;
    Ok(json(&CountMessageTokensResponse {
        input_tokens: prompt.tokens.len() as u32,
    }))
}

/// Returns a message without content.
fn message(id: String, model: String, counts: Counts) -> Message {
    Message {
        id,
        message_type: "message".into(),
        role: "assistant".into(),
        content: Vec::new(),
        model,
        stop_reason: None,
        stop_sequence: None,
        stop_details: None,
        usage: usage(counts),
        container: None,
    }
}

/// Returns the counts in Anthropic's form, where those of the cache are not among the input's.
fn usage(counts: Counts) -> Usage {
    Usage {
        cache_read_input_tokens: Some(counts.cached),
        ..Usage::from_counts(counts.computed(), counts.completion)
    }
}

/// Adds the content of an answer, and the reason of its end.
fn finish(message: &mut Message, reply: Reply) {
    let parts = reply.parts;
    let has_calls = !parts.calls.is_empty();
    if !parts.reasoning.is_empty() {
        message.content.push(thinking(parts.reasoning));
    }
    if !parts.content.is_empty() {
        message.content.push(text(parts.content));
    }
    let calls = parts.calls.into_iter().map(|call| {
        // The grammar of calls allows nothing but objects.
        let input = serde_json::from_str(&call.arguments).unwrap_or_default();
        tool_use(&call.id, call.name, input)
    });
    message.content.extend(calls);
    let (reason, sequence) = stop_reason(reply.finish, has_calls);
    (message.stop_reason, message.stop_sequence) = (Some(reason), sequence);
}

/// Returns the reason of an end in Anthropic's words, and the stop sequence.
fn stop_reason(finish: Finish, has_calls: bool) -> (StopReason, Option<String>) {
    match finish {
        Finish::Length => (StopReason::MaxTokens, None),
        Finish::StopString(text) => (StopReason::StopSequence, Some(text)),
        Finish::Stop | Finish::StopToken(_) if has_calls => (StopReason::ToolUse, None),
        Finish::Stop | Finish::StopToken(_) => (StopReason::EndTurn, None),
    }
}

fn text(text: String) -> ContentBlock {
    ContentBlock::Text {
        text,
        citations: None,
    }
}

/// Returns a block of reasoning. Its signature is empty: it is not checked when it comes back.
fn thinking(thinking: String) -> ContentBlock {
    ContentBlock::Thinking {
        thinking,
        signature: String::new(),
    }
}

/// Returns a call of a tool.
fn tool_use(id: &str, name: String, input: Value) -> ContentBlock {
    ContentBlock::ToolUse {
        id: id.replacen("call_", "toolu_", 1),
        name,
        input,
        caller: ToolUseCaller::Direct,
    }
}
