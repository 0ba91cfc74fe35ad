//! The division of an answer into reasoning, content and calls of tools.

use std::mem::take;

use marlin_text::harmony::{MessageDelta, MessageKind, MessageParser};

use crate::tools::ToolDelta;
use crate::tools::call::{CallObject, Malformed};

/// What divides the texts of two messages of the same kind.
const BREAK: &str = "\n\n";

/// Divides the text of an answer into reasoning, content and calls of tools while it is generated.
///
/// Where the text is divided into pieces changes nothing but the pieces of the result.
pub struct HarmonyParser {
    messages: MessageParser,
    body: Body,
    /// True if calls of tools are told apart.
    tells_calls: bool,
    /// The number of calls that have begun.
    calls: usize,
    /// True until a message has text.
    is_new: bool,
    /// True if there was reasoning.
    has_reasoning: bool,
    /// True if there was content.
    has_content: bool,
    deltas: Vec<HarmonyDelta>,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HarmonyDelta {
    /// Text of the channel `analysis`.
    Reasoning(String),
    /// Content, or a part of a call.
    Answer(ToolDelta),
}

/// The body of a message.
enum Body {
    Text(MessageKind),
    /// A message to a tool.
    Call(Box<Call>),
    /// The object of a call has ended.
    Called,
}

struct Call {
    object: CallObject,
    /// The body so far.
    text: String,
    /// True if the name was given out.
    is_announced: bool,
    /// What the body is if it is no call.
    kind: MessageKind,
}

impl HarmonyParser {
    /// Starts at the beginning of an answer to `prompt`, see [`MessageParser::new`]. Without
    /// `tells_calls`, for a model that may call no tool, calls are text of their channel.
    pub fn new(prompt: &str, tells_calls: bool) -> Self {
        Self {
            messages: MessageParser::new(prompt),
            body: Body::Text(MessageKind::Content),
            tells_calls,
            calls: 0,
            is_new: true,
            has_reasoning: false,
            has_content: false,
            deltas: Vec::new(),
        }
    }

    /// Adds text and returns the parts of the answer that it completes. Text that may be the start
    /// of a marker is held back, and so are headers.
    pub fn push(&mut self, text: &str) -> Vec<HarmonyDelta> {
        for delta in self.messages.push(text) {
            self.read(delta);
        }
        take(&mut self.deltas)
    }

    /// Ends the answer and returns its last parts. A call that is not complete is malformed.
    pub fn finish(mut self) -> Vec<HarmonyDelta> {
        for delta in self.messages.finish() {
            self.read(delta);
        }
        self.deltas
    }

    fn read(&mut self, delta: MessageDelta) {
        match delta {
            MessageDelta::Start { kind, tool } => self.start(kind, tool),
            MessageDelta::Text(text) => self.text(&text),
            MessageDelta::End => {
                if let Body::Call(_) = self.body {
                    self.not_a_call();
                }
            }
        }
    }

    fn start(&mut self, kind: MessageKind, tool: Option<String>) {
        self.is_new = true;
        self.body = match tool.filter(|_| self.tells_calls) {
            None => Body::Text(kind),
            Some(name) => Body::Call(Box::new(Call {
                object: CallObject::arguments_of(name),
                text: String::new(),
                is_announced: false,
                kind,
            })),
        };
    }

    fn text(&mut self, text: &str) {
        let mut rest = text.chars();
        while let Body::Call(call) = &mut self.body {
            let before = rest.as_str();
            let Some(character) = rest.next() else {
                return;
            };
            match call.object.push(character) {
                Ok(ended) => {
                    call.text.push(character);
                    self.continue_call(ended);
                }
                Err(Malformed) => {
                    self.not_a_call();
                    rest = before.chars();
                }
            }
        }
        let mut text = rest.as_str();
        if let Body::Called = self.body {
            text = text.trim_start_matches(|character: char| character.is_ascii_whitespace());
            if text.is_empty() {
                return;
            }
            // Text after the object is a message of its own.
            self.start(MessageKind::Content, None);
        }
        if let Body::Text(kind) = self.body {
            self.give(kind, text);
        }
    }

    fn continue_call(&mut self, ended: bool) {
        let Body::Call(call) = &mut self.body else {
            return;
        };
        let index = self.calls;
        if let Some(name) = call.object.name() {
            if !call.is_announced {
                call.is_announced = true;
                let name = name.to_string();
                let start = ToolDelta::Start { index, name };
                self.deltas.push(HarmonyDelta::Answer(start));
            }
            let fragment = call.object.take_fragment();
            match self.deltas.last_mut() {
                Some(HarmonyDelta::Answer(ToolDelta::Arguments { text, .. })) => *text += &fragment,
                _ => self.deltas.push(HarmonyDelta::Answer(ToolDelta::Arguments {
                    index,
                    text: fragment,
                })),
            }
        }
        if ended {
            let end = ToolDelta::End { index };
            self.deltas.push(HarmonyDelta::Answer(end));
            self.calls += 1;
            self.body = Body::Called;
        }
    }

    /// Ends a call whose body is not an object of JSON. The body is text instead.
    fn not_a_call(&mut self) {
        let Body::Call(call) = std::mem::replace(&mut self.body, Body::Called) else {
            return;
        };
        let Call { text, kind, .. } = *call;
        if !call.is_announced {
            self.body = Body::Text(kind);
            return self.give(kind, &text);
        }
        let index = self.calls;
        let malformed = ToolDelta::Malformed { index, text };
        self.deltas.push(HarmonyDelta::Answer(malformed));
        self.calls += 1;
        // The text is content, and so is what follows.
        self.is_new = false;
        self.has_content = true;
        self.body = Body::Text(MessageKind::Content);
    }

    /// Gives out text.
    fn give(&mut self, kind: MessageKind, text: &str) {
        if text.is_empty() {
            return;
        }
        let has_text = match kind {
            MessageKind::Reasoning => &mut self.has_reasoning,
            MessageKind::Content => &mut self.has_content,
        };
        let had_text = std::mem::replace(has_text, true);
        let before = match take(&mut self.is_new) && had_text {
            true => BREAK,
            false => "",
        };
        let last = match (self.deltas.last_mut(), kind) {
            (Some(HarmonyDelta::Reasoning(last)), MessageKind::Reasoning) => last,
            (Some(HarmonyDelta::Answer(ToolDelta::Content(last))), MessageKind::Content) => last,
            _ => {
                let text = format!("{before}{text}");
                return self.deltas.push(match kind {
                    MessageKind::Reasoning => HarmonyDelta::Reasoning(text),
                    MessageKind::Content => HarmonyDelta::Answer(ToolDelta::Content(text)),
                });
            }
        };
        last.push_str(before);
        last.push_str(text);
    }
}
