//! The chunks of a chat completion.

use super::{finish_reason, matched_stop};
use crate::generate::{Answers, Total, Update};
use crate::logprobs::Vocabulary;
use crate::output::Part;
use crate::sampling::StreamFields;
use crate::sse::{self, EventWriter};
use axum::response::sse::Event;
use openai_protocol::chat::{ChatCompletionStreamResponse, ChatMessageDelta, ChatStreamChoice};
use openai_protocol::common::{ChatLogProbs, FunctionCallDelta, ToolCallDelta, Usage};
use std::sync::Arc;

/// Writes `chat.completion.chunk` objects.
pub(super) struct ChunkWriter {
    /// A chunk without choices and usage.
    chunk: ChatCompletionStreamResponse,
    options: StreamFields,
    vocabulary: Option<Arc<Vocabulary>>,
    /// For each choice, true if it has calls of tools.
    has_calls: Vec<bool>,
    total: Total,
}

impl ChunkWriter {
    pub fn new(
        id: String,
        created: u64,
        model: String,
        answers: &Answers,
        options: StreamFields,
        vocabulary: Option<Arc<Vocabulary>>,
    ) -> Self {
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
            options,
            vocabulary,
            has_calls: vec![false; answers.len()],
            total: answers.total(),
        }
    }

    /// Returns the event of a chunk with one choice or none.
    fn event(&mut self, choice: Option<ChatStreamChoice>, usage: Option<Usage>) -> Event {
        self.chunk.choices.clear();
        self.chunk.choices.extend(choice);
        self.chunk.usage = usage;
        sse::data(&self.chunk)
    }

    /// Returns the usage so far if every chunk has it.
    fn continuous_usage(&self) -> Option<Usage> {
        self.options
            .continuous_usage
            .then(|| self.total.counts.openai())
    }

    /// Returns the events of an answer's parts. The log probabilities go with the first of them.
    fn deltas(
        &mut self,
        index: usize,
        parts: Vec<Part>,
        mut logprobs: Option<ChatLogProbs>,
    ) -> Vec<Event> {
        let mut deltas: Vec<_> = parts.into_iter().filter_map(delta).collect();
        self.has_calls[index] |= deltas.iter().any(|delta| delta.tool_calls.is_some());
        if deltas.is_empty() && logprobs.is_some() {
            deltas.push(empty());
        }
        let deltas = deltas.into_iter().map(|delta| {
            self.choice_event(ChatStreamChoice {
                logprobs: logprobs.take(),
                ..choice(index, delta)
            })
        });
        deltas.collect()
    }

    fn choice_event(&mut self, choice: ChatStreamChoice) -> Event {
        let usage = self.continuous_usage();
        self.event(Some(choice), usage)
    }
}

impl EventWriter for ChunkWriter {
    fn start(&mut self) -> Vec<Event> {
        let choices = 0..self.has_calls.len();
        choices
            .map(|index| {
                let delta = ChatMessageDelta {
                    role: Some("assistant".into()),
                    content: Some(String::new()),
                    ..empty()
                };
                self.choice_event(choice(index, delta))
            })
            .collect()
    }

    fn update(&mut self, index: usize, update: Update) -> Vec<Event> {
        self.total.count(index, &update);
        match update {
            Update::Token { parts, logprobs } => {
                let logprobs = match (&self.vocabulary, &logprobs) {
                    (Some(vocabulary), Some(logprobs)) => Some(vocabulary.chat([logprobs])),
                    _ => None,
                };
                self.deltas(index, parts, logprobs)
            }
            Update::End { parts, finish, .. } => {
                let mut events = self.deltas(index, parts, None);
                let reason = finish_reason(&finish, self.has_calls[index]);
                events.push(self.choice_event(ChatStreamChoice {
                    finish_reason: Some(reason.into()),
                    matched_stop: matched_stop(&finish),
                    ..choice(index, empty())
                }));
                events
            }
            Update::Failed(error) => vec![sse::data(&error.openai()), done()],
        }
    }

    fn end(&mut self) -> Vec<Event> {
        let usage = self.options.usage.then(|| self.total.counts.openai());
        let usage = usage.map(|usage| self.event(None, Some(usage)));
        usage.into_iter().chain([done()]).collect()
    }
}

/// Returns the event that ends a stream of OpenAI's API.
pub(crate) fn done() -> Event {
    Event::default().data("[DONE]")
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
