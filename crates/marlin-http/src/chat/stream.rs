//! The chunks of a chat completion.

use crate::chunks::ChunkForm;
use crate::generate::{Finish, Logprobs};
use crate::logprobs::Vocabulary;
use crate::output::Part;
use crate::sse;
use axum::response::sse::Event;
use openai_protocol::chat::{ChatCompletionStreamResponse, ChatMessageDelta, ChatStreamChoice};
use openai_protocol::common::{FunctionCallDelta, ToolCallDelta, Usage};

/// The form of `chat.completion.chunk` objects.
pub(super) struct ChatForm {
    /// A chunk without choices and usage.
    chunk: ChatCompletionStreamResponse,
    answers: Vec<AnswerState>,
}

/// What was written of an answer.
#[derive(Debug, Clone, Copy, Default)]
struct AnswerState {
    /// True after the role.
    started: bool,
    /// True if it has calls of tools.
    has_calls: bool,
}

impl ChatForm {
    /// `answers` is the number of answers.
    pub fn new(id: String, created: u64, model: String, answers: usize) -> Self {
        Self {
            chunk: ChatCompletionStreamResponse {
                id,
                object: "chat.completion.chunk".into(),
                created,
                model,
                system_fingerprint: None,
                choices: Vec::new(),
                usage: None,
            },
            answers: vec![AnswerState::default(); answers],
        }
    }
}

impl ChunkForm for ChatForm {
    type Choice = ChatStreamChoice;

    /// The role is in a choice of its own before the first. The log probabilities are in the first
    /// after it, the finish reason is in the last.
    fn choices(
        &mut self,
        index: usize,
        parts: Vec<Part>,
        logprobs: Option<(&Vocabulary, &Logprobs)>,
        finish: Option<Finish>,
    ) -> Vec<ChatStreamChoice> {
        let answer = &mut self.answers[index];
        let mut deltas: Vec<_> = parts.into_iter().filter_map(delta).collect();
        let is_call = |delta: &ChatMessageDelta| delta.tool_calls.is_some();
        answer.has_calls |= deltas.iter().any(is_call);
        // Clients take the end of a call from a chunk after it.
        let needs_end = finish.is_some() && deltas.last().is_none_or(is_call);
        if needs_end || (deltas.is_empty() && logprobs.is_some()) {
            deltas.push(empty());
        }
        let mut choices: Vec<_> = deltas
            .into_iter()
            .map(|delta| choice(index, delta))
            .collect();
        if let Some(first) = choices.first_mut() {
            first.logprobs = logprobs.map(|(vocabulary, logprobs)| vocabulary.chat([logprobs]));
        }
        if let (Some(last), Some(finish)) = (choices.last_mut(), finish) {
            last.finish_reason = Some(finish.openai(answer.has_calls).into());
            last.matched_stop = finish.matched_stop();
        }
        if !answer.started && !choices.is_empty() {
            answer.started = true;
            let role = ChatMessageDelta {
                role: Some("assistant".into()),
                content: Some(String::new()),
                ..empty()
            };
            choices.insert(0, choice(index, role));
        }
        choices
    }

    fn event(&mut self, choice: Option<ChatStreamChoice>, usage: Option<Usage>) -> Event {
        self.chunk.choices.clear();
        self.chunk.choices.extend(choice);
        self.chunk.usage = usage;
        sse::data(&self.chunk)
    }
}

fn empty() -> ChatMessageDelta {
    ChatMessageDelta {
        role: None,
        content: None,
        tool_calls: None,
        reasoning_content: None,
    }
}

fn choice(index: usize, delta: ChatMessageDelta) -> ChatStreamChoice {
    ChatStreamChoice {
        index: index as u32,
        delta,
        logprobs: None,
        finish_reason: None,
        matched_stop: None,
    }
}

/// Returns the delta for a part of an answer.
fn delta(part: Part) -> Option<ChatMessageDelta> {
    Some(match part {
        Part::Content(text) => ChatMessageDelta {
            content: Some(text),
            ..empty()
        },
        Part::Reasoning(text) => ChatMessageDelta {
            reasoning_content: Some(text),
            ..empty()
        },
        Part::Call { index, id, name } => call(index, Some(id), Some(name), String::new()),
        Part::Arguments { index, text } => call(index, None, None, text),
        Part::Malformed { .. } => return None,
    })
}

fn call(index: usize, id: Option<String>, name: Option<String>, text: String) -> ChatMessageDelta {
    let tool_type = id.is_some().then(|| "function".into());
    ChatMessageDelta {
        tool_calls: Some(vec![ToolCallDelta {
            index: index as u32,
            id,
            tool_type,
            function: Some(FunctionCallDelta {
                name,
                arguments: Some(text),
            }),
        }]),
        ..empty()
    }
}
