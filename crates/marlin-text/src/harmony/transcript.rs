//! An answer as a text for people.

use super::{MessageDelta, MessageKind, MessageParser};

/// Writes an answer as a text for people while it is generated: reasoning after a line
/// `[analysis]`, and the content that follows it after a line `[final]`. An answer without
/// reasoning is its content alone. An empty line divides messages.
#[derive(Debug)]
pub struct Transcript {
    parser: MessageParser,
    text: Text,
}

/// The end of a [`Transcript`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TranscriptEnd {
    /// The rest of the text.
    pub rest: String,
    /// The content of the answer, without the reasoning and without headings.
    pub content: String,
}

/// The text so far.
#[derive(Debug)]
struct Text {
    /// The kind of the message.
    kind: MessageKind,
    /// The kind of the message that was written last; `None` before the first text.
    written: Option<MessageKind>,
    /// True until the message has text.
    is_new: bool,
    content: String,
}

impl Transcript {
    /// Starts at the beginning of an answer to `prompt`, see [`MessageParser::new`].
    pub fn new(prompt: &str) -> Self {
        Self {
            parser: MessageParser::new(prompt),
            text: Text {
                kind: MessageKind::Content,
                written: None,
                is_new: true,
                content: String::new(),
            },
        }
    }

    /// Adds a piece of the answer and returns the text that it completes.
    pub fn push(&mut self, piece: &str) -> String {
        self.text.write(self.parser.push(piece))
    }

    /// Ends the answer.
    pub fn finish(mut self) -> TranscriptEnd {
        let rest = self.text.write(self.parser.finish());
        let content = self.text.content;
        TranscriptEnd { rest, content }
    }
}

impl Text {
    /// Returns the text for the parts of an answer.
    fn write(&mut self, deltas: Vec<MessageDelta>) -> String {
        let mut shown = String::new();
        for delta in deltas {
            match delta {
                MessageDelta::Start { kind, .. } => (self.kind, self.is_new) = (kind, true),
                MessageDelta::Text(text) => {
                    if std::mem::take(&mut self.is_new) {
                        self.start_text(&mut shown);
                    }
                    shown += &text;
                    if self.kind == MessageKind::Content {
                        self.content += &text;
                    }
                }
                MessageDelta::End => {}
            }
        }
        shown
    }

    /// Writes what comes before the text of a message.
    fn start_text(&mut self, shown: &mut String) {
        let before = self.written.replace(self.kind);
        if before.is_some() {
            *shown += "\n\n";
        }
        *shown += match (before, self.kind) {
            (Some(before), kind) if before == kind => "",
            (_, MessageKind::Reasoning) => "[analysis]\n",
            (Some(_), MessageKind::Content) => "[final]\n",
            (None, MessageKind::Content) => "",
        };
        if self.kind == MessageKind::Content && !self.content.is_empty() {
            self.content += "\n\n";
        }
    }
}
