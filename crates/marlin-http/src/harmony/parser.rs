//! The division of an answer into reasoning, content and calls of tools.

use std::mem::take;

use super::header::{Header, Kind};
use super::{ASSISTANT, CHANNEL, CONSTRAIN, MARKERS, MESSAGE, START, open_message};
use crate::tools::ToolDelta;
use crate::tools::call::{CallObject, Malformed};

/// What divides the texts of two messages of the same kind.
const BREAK: &str = "\n\n";

/// Divides the text of an answer into reasoning, content and calls of tools while it is generated.
///
/// Where the text is divided into pieces changes nothing but the pieces of the result.
pub struct HarmonyParser {
    state: State,
    /// The start of a marker.
    held: String,
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

enum State {
    /// Outside of messages.
    Between,
    Header(Header),
    /// The body of a message.
    Body(Kind),
    /// The body of a message to a tool.
    Call(Box<Call>),
}

struct Call {
    object: CallObject,
    /// The body so far.
    text: String,
    /// True if the name was given out.
    is_announced: bool,
    /// What the body is if it is no call.
    kind: Kind,
}

impl HarmonyParser {
    /// Starts at the beginning of an answer to `prompt`, the text that a chat template rendered: it
    /// ends after the role of a message, or in the message that the answer continues. Without
    /// `tells_calls`, for a model that may call no tool, calls are text of their channel.
    pub fn new(prompt: &str, tells_calls: bool) -> Self {
        let mut parser = Self {
            state: State::Header(Header::default()),
            held: String::new(),
            tells_calls: false,
            calls: 0,
            is_new: true,
            has_reasoning: false,
            has_content: false,
            deltas: Vec::new(),
        };
        match open_message(prompt).trim_end() {
            "" | ASSISTANT => parser.state = State::Header(Header::after_role()),
            message => drop(parser.push(message)),
        }
        Self {
            tells_calls,
            held: String::new(),
            is_new: false,
            has_reasoning: false,
            has_content: false,
            ..parser
        }
    }

    /// Adds text and returns the parts of the answer that it completes. Text that may be the start
    /// of a marker is held back, and so are headers.
    pub fn push(&mut self, text: &str) -> Vec<HarmonyDelta> {
        for character in text.chars() {
            self.step(character);
        }
        take(&mut self.deltas)
    }

    /// Ends the answer and returns its last parts. A call that is not complete is malformed.
    pub fn finish(mut self) -> Vec<HarmonyDelta> {
        self.release();
        self.end_message();
        self.deltas
    }

    fn step(&mut self, character: char) {
        self.held.push(character);
        let is_start = |marker: &&str| marker.starts_with(self.held.as_str());
        match MARKERS.into_iter().find(is_start) {
            Some(marker) if marker == self.held => {
                self.held.clear();
                self.marker(marker);
            }
            Some(_) => {}
            None => {
                self.held.pop();
                self.release();
                // All markers start with `<`, and have it nowhere else.
                match character {
                    '<' => self.held.push(character),
                    _ => self.text(character),
                }
            }
        }
    }

    /// Reads the held text, which is not the start of a marker.
    fn release(&mut self) {
        for character in take(&mut self.held).chars() {
            self.text(character);
        }
    }

    fn marker(&mut self, marker: &str) {
        match (marker, &mut self.state) {
            (CHANNEL, State::Header(header)) => header.start_channel(),
            (CONSTRAIN, State::Header(header)) => header.start_type(),
            (MESSAGE, State::Header(header)) => {
                let header = take(header);
                self.open_body(&header);
            }
            (MESSAGE, State::Between) => self.open_body(&Header::default()),
            // It may be a part of a string.
            (MESSAGE | CONSTRAIN, State::Call(_)) => {
                for character in marker.chars() {
                    self.text(character);
                }
            }
            (MESSAGE | CONSTRAIN, _) => {}
            // The end of the message before was left out.
            (START | CHANNEL, _) => {
                self.end_message();
                let mut header = Header::default();
                if marker == CHANNEL {
                    header = Header::after_role();
                    header.start_channel();
                }
                self.state = State::Header(header);
            }
            _ => self.end_message(),
        }
    }

    fn text(&mut self, character: char) {
        match &mut self.state {
            State::Between if character.is_ascii_whitespace() => {}
            State::Between => {
                self.open_body(&Header::default());
                self.text(character);
            }
            State::Header(header) => {
                header.push(character);
                if header.is_text() {
                    let header = take(header);
                    self.stray(&header);
                }
            }
            &mut State::Body(kind) => self.give(kind, character.encode_utf8(&mut [0; 4])),
            State::Call(call) => match call.object.push(character) {
                Ok(ended) => {
                    call.text.push(character);
                    self.continue_call(ended);
                }
                Err(Malformed) => {
                    let kind = self.not_a_call();
                    self.state = State::Body(kind);
                    self.text(character);
                }
            },
        }
    }

    fn open_body(&mut self, header: &Header) {
        self.is_new = true;
        self.state = match header.tool().filter(|_| self.tells_calls) {
            None => State::Body(header.kind()),
            Some(name) => State::Call(Box::new(Call {
                object: CallObject::arguments_of(name.into()),
                text: String::new(),
                is_announced: false,
                kind: header.kind(),
            })),
        };
    }

    /// Reads the text of a header without a body as one.
    fn stray(&mut self, header: &Header) {
        let kind = header.kind();
        self.is_new = true;
        self.state = State::Body(kind);
        self.give(kind, header.stray());
    }

    fn continue_call(&mut self, ended: bool) {
        let State::Call(call) = &mut self.state else {
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
            self.state = State::Between;
        }
    }

    /// Ends a call whose body is not an object of JSON. Returns what the body is instead.
    fn not_a_call(&mut self) -> Kind {
        let State::Call(call) = std::mem::replace(&mut self.state, State::Between) else {
            return Kind::Content;
        };
        let Call { text, kind, .. } = *call;
        if call.is_announced {
            let index = self.calls;
            let malformed = ToolDelta::Malformed { index, text };
            self.deltas.push(HarmonyDelta::Answer(malformed));
            self.calls += 1;
            // The text is content, and so is what follows.
            self.is_new = false;
            self.has_content = true;
            return Kind::Content;
        }
        self.give(kind, &text);
        kind
    }

    /// Ends the message, or the header without a body.
    fn end_message(&mut self) {
        match &mut self.state {
            State::Header(header) => {
                let header = take(header);
                self.stray(&header);
            }
            State::Call(_) => drop(self.not_a_call()),
            State::Between | State::Body(_) => {}
        }
        self.state = State::Between;
    }

    /// Gives out text.
    fn give(&mut self, kind: Kind, text: &str) {
        if text.is_empty() {
            return;
        }
        let has_text = match kind {
            Kind::Reasoning => &mut self.has_reasoning,
            Kind::Content => &mut self.has_content,
        };
        let had_text = std::mem::replace(has_text, true);
        let before = match take(&mut self.is_new) && had_text {
            true => BREAK,
            false => "",
        };
        let last = match (self.deltas.last_mut(), kind) {
            (Some(HarmonyDelta::Reasoning(last)), Kind::Reasoning) => last,
            (Some(HarmonyDelta::Answer(ToolDelta::Content(last))), Kind::Content) => last,
            _ => {
                let text = format!("{before}{text}");
                return self.deltas.push(match kind {
                    Kind::Reasoning => HarmonyDelta::Reasoning(text),
                    Kind::Content => HarmonyDelta::Answer(ToolDelta::Content(text)),
                });
            }
        };
        last.push_str(before);
        last.push_str(text);
    }
}
