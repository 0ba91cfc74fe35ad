//! The harmony format, in which gpt-oss models write.
//!
//! An answer is a sequence of messages, each with a header and a body:
//!
//! ```text
//! <|channel|>analysis<|message|>The user greets.<|end|>
//! <|start|>assistant<|channel|>final<|message|>Hello!<|return|>
//! ```
//!
//! | header | the body is |
//! |---|---|
//! | `<\|channel\|>analysis` | reasoning |
//! | `<\|channel\|>final` | content |
//! | `<\|channel\|>commentary` | content: what the model says before it calls a tool |
//! | a recipient, ` to=functions.NAME`, after the role or the channel | the arguments of a call: an object of JSON |
//!
//! [`MessageParser`] divides an answer into messages while it is generated; [`Transcript`] writes
//! them as a text for people.
//!
//! An answer that does not keep to the format loses no text but the markers and the headers: the
//! body of an unknown channel, or of none, is content, and so is text outside of messages.
//!
//! ```
//! use marlin_text::harmony::Transcript;
//!
//! let mut transcript = Transcript::new("<|start|>user<|message|>Hi<|end|><|start|>assistant");
//! let shown = transcript.push(
//!     "<|channel|>analysis<|message|>A greeting.<|end|>\
//!      <|start|>assistant<|channel|>final<|message|>Hello!",
//! );
//! assert_eq!(shown, "[analysis]\nA greeting.\n\n[final]\nHello!");
//! assert_eq!(transcript.finish().content, "Hello!");
//! ```

mod header;
mod parser;
#[cfg(test)]
mod tests;
mod transcript;

pub use parser::{MessageDelta, MessageKind, MessageParser};
pub use transcript::{Transcript, TranscriptEnd};

/// The texts that divide an answer. They are special tokens, which decoding skips, but the text
/// that a [`MessageParser`] is given must contain them: its tokenizer
/// [shows](crate::Tokenizer::showing) them.
pub const MARKERS: [&str; 7] = [
    START,
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    END,
    "<|call|>",
    "<|return|>",
];

/// Starts the header of a message.
pub const START: &str = "<|start|>";
/// Comes before the channel in a header.
pub const CHANNEL: &str = "<|channel|>";
/// Comes before the type of a body in a header.
pub const CONSTRAIN: &str = "<|constrain|>";
/// Ends a header and starts the body of a message.
pub const MESSAGE: &str = "<|message|>";
/// Ends a message that is not the last one. `<|call|>` ends one that waits for a tool, `<|return|>`
/// the last one.
pub const END: &str = "<|end|>";
/// The role of the model.
pub const ASSISTANT: &str = "assistant";

/// Returns what `prompt` has of the message that the answer continues: all after the last start of
/// a message.
fn open_message(prompt: &str) -> &str {
    let start = prompt.rfind(START);
    start.map_or("", |start| &prompt[start + START.len()..])
}

/// Returns true if the answer to `prompt` continues the body of a message, not a header.
pub fn continues_body(prompt: &str) -> bool {
    open_message(prompt).contains(MESSAGE)
}
