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
//! [`HarmonyParser`] divides an answer while it is generated. Texts of two messages of the same
//! kind are divided by an empty line.
//!
//! An answer that does not keep to the format loses no text but the markers and the headers: the
//! body of an unknown channel, or of none, is content, and so is text outside of messages.

mod conversation;
mod grammar;
mod header;
mod parser;
#[cfg(test)]
mod tests;

pub(crate) use conversation::Adapted;
pub(crate) use grammar::{calls_grammar, final_grammar};
pub use parser::{HarmonyDelta, HarmonyParser};

/// The texts that divide an answer. They are special tokens, which decoding skips, but the text
/// that a [`HarmonyParser`] is given must contain them: see [`shown_tokens`](crate::shown_tokens).
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
const START: &str = "<|start|>";
/// Comes before the channel in a header.
const CHANNEL: &str = "<|channel|>";
/// Comes before the type of a body in a header.
const CONSTRAIN: &str = "<|constrain|>";
/// Ends a header and starts the body of a message.
const MESSAGE: &str = "<|message|>";
/// Ends a message that is not the last one. `<|call|>` ends one that waits for a tool, `<|return|>`
/// the last one.
const END: &str = "<|end|>";
/// The role of the model.
const ASSISTANT: &str = "assistant";

/// Returns what `prompt` has of the message that the answer continues: all after the last start of
/// a message.
fn open_message(prompt: &str) -> &str {
    let start = prompt.rfind(START);
    start.map_or("", |start| &prompt[start + START.len()..])
}

/// Returns true if the answer to `prompt` continues the body of a message, not a header.
pub(crate) fn continues_body(prompt: &str) -> bool {
    open_message(prompt).contains(MESSAGE)
}
