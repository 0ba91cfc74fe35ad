//! The division of an answer into messages.

use std::mem::take;

use super::header::Header;
use super::{ASSISTANT, CHANNEL, CONSTRAIN, MARKERS, MESSAGE, START, open_message};

/// Divides the text of an answer into messages while it is generated.
///
/// Where the text is divided into pieces changes nothing but the pieces of the result.
#[derive(Debug)]
pub struct MessageParser {
    state: State,
    /// The start of a marker.
    held: String,
    deltas: Vec<MessageDelta>,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MessageDelta {
    /// The body of a message begins.
    Start {
        /// What the body is, if it is no call.
        kind: MessageKind,
        /// The tool that the message calls, without the namespace `functions`.
        tool: Option<String>,
    },
    /// The next part of the body, which is not empty.
    Text(String),
    /// The message ends.
    End,
}

/// What the body of a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageKind {
    /// Text of the channel `analysis`.
    Reasoning,
    /// Text of another channel, or of none.
    Content,
}

#[derive(Debug)]
enum State {
    /// The place between messages.
    Between,
    Header(Header),
    Body {
        kind: MessageKind,
        /// True if the message calls a tool.
        is_call: bool,
    },
}

impl MessageParser {
    /// Starts at the beginning of an answer to `prompt`, the text that a chat template rendered: it
    /// ends after the role of a message, or in the message that the answer continues. The answer
    /// calls no tool in that message, since the start of a call would be in the prompt.
    pub fn new(prompt: &str) -> Self {
        let mut parser = Self {
            state: State::Header(Header::after_role()),
            held: String::new(),
            deltas: Vec::new(),
        };
        let message = open_message(prompt).trim_end();
        if !matches!(message, "" | ASSISTANT) {
            parser.state = State::Header(Header::default());
            parser.push(message);
            parser.held.clear();
            if let State::Body { kind, is_call } = &mut parser.state {
                *is_call = false;
                let start = MessageDelta::Start {
                    kind: *kind,
                    tool: None,
                };
                parser.deltas.push(start);
            }
        }
        parser
    }

    /// Adds text and returns the parts of the answer that it completes. Text that may be the start
    /// of a marker is held back, and so are headers.
    pub fn push(&mut self, text: &str) -> Vec<MessageDelta> {
        for character in text.chars() {
            self.step(character);
        }
        take(&mut self.deltas)
    }

    /// Ends the answer and returns its last parts.
    pub fn finish(&mut self) -> Vec<MessageDelta> {
        self.release();
        self.end_message();
        take(&mut self.deltas)
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
                self.open_body(header.kind(), header.tool());
            }
            (MESSAGE, State::Between) => self.open_body(MessageKind::Content, None),
            // It may be a part of a string in the arguments.
            (MESSAGE | CONSTRAIN, State::Body { is_call: true, .. }) => self.give(marker),
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
            State::Between if character.is_ascii_whitespace() => return,
            State::Between => self.open_body(MessageKind::Content, None),
            State::Header(header) => {
                header.push(character);
                if header.is_text() {
                    let header = take(header);
                    self.stray(&header);
                }
                return;
            }
            State::Body { .. } => {}
        }
        self.give(character.encode_utf8(&mut [0; 4]));
    }

    fn open_body(&mut self, kind: MessageKind, tool: Option<&str>) {
        let tool = tool.map(String::from);
        let is_call = tool.is_some();
        self.deltas.push(MessageDelta::Start { kind, tool });
        self.state = State::Body { kind, is_call };
    }

    /// Reads the text of a header without a body as one.
    fn stray(&mut self, header: &Header) {
        self.open_body(header.kind(), None);
        self.give(header.stray());
    }

    /// Ends the message, or the header without a body.
    fn end_message(&mut self) {
        if let State::Header(header) = &mut self.state {
            let header = take(header);
            match header.stray() {
                "" => self.state = State::Between,
                _ => self.stray(&header),
            }
        }
        if let State::Body { .. } = self.state {
            self.deltas.push(MessageDelta::End);
        }
        self.state = State::Between;
    }

    /// Gives out text of the body.
    fn give(&mut self, text: &str) {
        match self.deltas.last_mut() {
            Some(MessageDelta::Text(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.deltas.push(MessageDelta::Text(text.into())),
        }
    }
}
