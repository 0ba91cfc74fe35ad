//! The items of a response.

use crate::output::Joined;
use crate::state::ApiState;
use openai_protocol::common::ChatLogProbs;
use openai_protocol::responses::{
    ResponseContentPart, ResponseOutputItem, ResponseReasoningContent,
};
use serde_json::Value;

/// The states of an item.
pub(super) const IN_PROGRESS: &str = "in_progress";
pub(super) const COMPLETED: &str = "completed";
pub(super) const INCOMPLETE: &str = "incomplete";

/// The log probabilities of a text's tokens; `None` if the request does not ask for them.
pub(super) type TextLogprobs = Option<Vec<Value>>;

/// Returns the items of a whole answer. The last one has `status`, the others are complete.
/// `logprobs` are those of the content.
pub(super) fn items(
    state: &ApiState,
    parts: Joined,
    logprobs: TextLogprobs,
    status: &str,
) -> Vec<ResponseOutputItem> {
    let count = usize::from(!parts.reasoning.is_empty())
        + usize::from(!parts.content.is_empty())
        + parts.calls.len();
    let mut left = count;
    let mut next = || {
        left -= 1;
        if left == 0 { status } else { COMPLETED }
    };
    let mut items = Vec::with_capacity(count);
    if !parts.reasoning.is_empty() {
        let content = vec![reasoning_text(parts.reasoning)];
        items.push(reasoning(state.new_id("rs_"), content, next()));
    }
    if !parts.content.is_empty() {
        let content = vec![output_text(parts.content, logprobs)];
        items.push(message(state.new_id("msg_"), content, next()));
    }
    for own in parts.calls {
        let id = state.new_id("fc_");
        items.push(call(id, own.id, own.name, own.arguments, next()));
    }
    items
}

pub(super) fn message(
    id: String,
    content: Vec<ResponseContentPart>,
    status: &str,
) -> ResponseOutputItem {
    ResponseOutputItem::new_message(id, "assistant".into(), content, status.into())
}

pub(super) fn output_text(text: String, logprobs: TextLogprobs) -> ResponseContentPart {
    ResponseContentPart::OutputText {
        text,
        annotations: Vec::new(),
        // A list, unlike in chat completions.
        logprobs: logprobs.map(|list| ChatLogProbs::Raw(list.into())),
    }
}

pub(super) fn reasoning(
    id: String,
    content: Vec<ResponseReasoningContent>,
    status: &str,
) -> ResponseOutputItem {
    ResponseOutputItem::new_reasoning(id, Vec::new(), content, Some(status.into()))
}

pub(super) fn reasoning_text(text: String) -> ResponseReasoningContent {
    ResponseReasoningContent::ReasoningText { text }
}

pub(super) fn call(
    id: String,
    call_id: String,
    name: String,
    arguments: String,
    status: &str,
) -> ResponseOutputItem {
    ResponseOutputItem::FunctionToolCall {
        id: Some(id),
        call_id,
        name,
        namespace: None,
        arguments,
        output: None,
        status: status.into(),
    }
}
