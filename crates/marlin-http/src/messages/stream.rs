//! The events of a message.

use super::{stop_reason, text, thinking, tool_use};
use crate::generate::{Counts, Finish, Update};
use crate::output::Part;
use crate::sse::{self, EventWriter};
use axum::response::sse::Event;
use openai_protocol::messages::{
    ContentBlock, ContentBlockDelta, Message, MessageDelta, MessageDeltaUsage, MessageStreamEvent,
};
use serde_json::{Map, Value};

/// Writes the events from `message_start` to `message_stop`.
pub(super) struct MessageWriter {
    message: Message,
    /// The block that is open, if one is.
    open: Option<Open>,
    /// The number of blocks before the next one.
    blocks: u32,
    has_calls: bool,
}

/// The kind of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Text,
    Thinking,
    Call,
}

impl MessageWriter {
    /// `message` has no content.
    pub fn new(message: Message) -> Self {
        Self {
            message,
            open: None,
            blocks: 0,
            has_calls: false,
        }
    }

    /// Ends the open block.
    fn close(&mut self, events: &mut Vec<Event>) {
        let Some(open) = self.open.take() else {
            return;
        };
        let index = self.blocks;
        if open == Open::Thinking {
            let signature = String::new();
            let delta = ContentBlockDelta::SignatureDelta { signature };
            events.push(event(&MessageStreamEvent::ContentBlockDelta {
                index,
                delta,
            }));
        }
        events.push(event(&MessageStreamEvent::ContentBlockStop { index }));
        self.blocks += 1;
    }

    /// Ends the open block if it is of another kind, and begins one.
    fn open(&mut self, kind: Open, block: ContentBlock, events: &mut Vec<Event>) {
        if self.open == Some(kind) && kind != Open::Call {
            return;
        }
        self.close(events);
        self.open = Some(kind);
        events.push(event(&MessageStreamEvent::ContentBlockStart {
            index: self.blocks,
            content_block: block,
        }));
    }

    fn parts(&mut self, parts: Vec<Part>, events: &mut Vec<Event>) {
        for part in parts {
            let delta = match part {
                Part::Content(content) => {
                    self.open(Open::Text, text(String::new()), events);
                    ContentBlockDelta::TextDelta { text: content }
                }
                Part::Reasoning(reasoning) => {
                    self.open(Open::Thinking, thinking(String::new()), events);
                    ContentBlockDelta::ThinkingDelta {
                        thinking: reasoning,
                    }
                }
                Part::Call { id, name, .. } => {
                    self.has_calls = true;
                    let block = tool_use(&id, name, Value::Object(Map::new()));
                    self.open(Open::Call, block, events);
                    continue;
                }
                Part::Arguments { text, .. } => {
                    ContentBlockDelta::InputJsonDelta { partial_json: text }
                }
                Part::Malformed { .. } => continue,
            };
            let index = self.blocks;
            events.push(event(&MessageStreamEvent::ContentBlockDelta {
                index,
                delta,
            }));
        }
    }

    fn finish(&mut self, finish: Finish, counts: Counts, events: &mut Vec<Event>) {
        self.close(events);
        let (reason, sequence) = stop_reason(finish, self.has_calls);
        events.push(event(&MessageStreamEvent::MessageDelta {
            delta: MessageDelta {
                stop_reason: Some(reason),
                stop_sequence: sequence,
                ..MessageDelta::default()
            },
            usage: MessageDeltaUsage {
                output_tokens: counts.completion,
                input_tokens: Some(counts.computed()),
                cache_creation_input_tokens: Some(0),
                cache_read_input_tokens: Some(counts.cached),
                server_tool_use: None,
                output_tokens_details: None,
            },
        }));
    }
}

impl EventWriter for MessageWriter {
    fn start(&mut self) -> Vec<Event> {
        let message = self.message.clone();
        vec![event(&MessageStreamEvent::MessageStart { message })]
    }

    fn update(&mut self, _index: usize, update: Update) -> Vec<Event> {
        let mut events = Vec::new();
        match update {
            Update::Token { parts, .. } => self.parts(parts, &mut events),
            Update::End {
                parts,
                finish,
                counts,
                ..
            } => {
                self.parts(parts, &mut events);
                self.finish(finish, counts, &mut events);
            }
            Update::Failed(error) => {
                let error = error.anthropic();
                events.push(event(&MessageStreamEvent::Error { error }));
            }
        }
        events
    }

    fn end(&mut self) -> Vec<Event> {
        vec![event(&MessageStreamEvent::MessageStop)]
    }

    fn ping(&self) -> Event {
        event(&MessageStreamEvent::Ping)
    }
}

/// Returns an event with its name.
fn event(event: &MessageStreamEvent) -> Event {
    let name = match event {
        MessageStreamEvent::MessageStart { .. } => "message_start",
        MessageStreamEvent::MessageDelta { .. } => "message_delta",
        MessageStreamEvent::MessageStop => "message_stop",
        MessageStreamEvent::ContentBlockStart { .. } => "content_block_start",
        MessageStreamEvent::ContentBlockDelta { .. } => "content_block_delta",
        MessageStreamEvent::ContentBlockStop { .. } => "content_block_stop",
        MessageStreamEvent::Ping => "ping",
        MessageStreamEvent::Error { .. } => "error",
    };
    sse::named(name, event)
}
