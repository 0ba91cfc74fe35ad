//! The chat template and the tokenizer of a model's folder.
//!
//! - [`ChatTemplate`] renders a conversation to text in the form that a model was trained on.
//! - [`Tokenizer`] encodes texts to tokens and decodes tokens to texts; [`TextStream`] decodes
//!   token by token.
//!
//! A template is a program, and a tokenizer is close to one: from an untrusted folder, either may
//! run forever, use all memory, or crash the process. Templates and tokenizers run in a *worker*,
//! which limits the time and memory of every call. If the program calls [`init`] first in `main`, a
//! worker is a separate process, started from the program's own executable. A failure of the worker
//! becomes a [`Failure`], and the next call starts a new worker.
//!
//! ```
//! fn main() -> Result<(), marlin_text::TextError> {
//!     marlin_text::init();
//!     let template = marlin_text::ChatTemplate::compile(
//!         "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
//!         "chat_template.jinja".into(),
//!         Default::default(),
//!     )?;
//!     assert_eq!(template.render(&[marlin_text::Message::user("Hello")], true)?, "user: Hello\n");
//!     Ok(())
//! }
//! ```
//!
//! | | a worker process | without `init` |
//! |---|---|---|
//! | a panic, a template of too many steps | an error | an error |
//! | a call that takes too long | an error | runs on |
//! | nesting that takes all of the stack | an error | ends the program |
//! | memory | bounded on Linux | not bounded |

mod chat;
mod error;
mod stream;
mod tokenizer;
mod tokenizer_config;
mod worker;

pub use chat::{ChatTemplate, Message};
pub use error::{Failure, TextError};
pub use stream::TextStream;
pub use tokenizer::Tokenizer;
pub use worker::init;

#[cfg(test)]
mod tests {
    /// Returns a `tokenizer.json` of byte-level BPE with the bytes 0..=255 as tokens, then `<s>`
    /// 256 and `</s>` 257. It starts texts with `<s>`.
    pub fn byte_level_tokenizer() -> serde_json::Value {
        serde_json::from_str(include_str!("../tests/byte_level.json")).unwrap()
    }
}
