//! The chat template and the tokenizer of a model's folder.
//!
//! - [`ChatTemplate`] renders a conversation to text in the form that a model was trained on.
//! - [`Tokenizer`] encodes texts to tokens and decodes tokens to texts; [`TextStream`] decodes
//!   token by token.
//! - [`harmony`] divides the answers of gpt-oss models into reasoning and content.
//!
//! A template is a program, and a tokenizer is close to one: from an untrusted folder, either may
//! run for very long, use all memory, or crash. They run in the program's own process, within these
//! bounds:
//!
//! - A template takes at most 4 million steps, has at most 256 KiB, and renders at most 32 MiB
//!   of text. Its values, expressions and macros are nested to a bounded depth.
//! - Files are parsed, and templates run, on the stack of a thread of their own, which is large
//!   enough for that depth.
//! - A panic becomes an error. The program's panic hook runs, which by default prints a message.
//!
//! Each excess is a [`Failure`], after which the next call works.
//!
//! ```
//! let template = marlin_text::ChatTemplate::compile(
//!     "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
//!     "chat_template.jinja".into(),
//!     Default::default(),
//! )?;
//! assert_eq!(template.render(&[marlin_text::Message::user("Hello")], true)?, "user: Hello\n");
//! # Ok::<(), marlin_text::TextError>(())
//! ```
//!
//! # The sandbox
//!
//! These bounds do not limit the memory of a call, nor its time: one step of a template may double
//! a text, and a pattern of a tokenizer may backtrack for long. A program that opens folders from
//! unknown sources enables the feature `sandbox`, which is off by default, and calls `init` first
//! in `main`. Templates and tokenizers then run in *worker processes*, which are started from the
//! program's own executable. Without the call, the feature changes nothing.
//!
//! | | in the program's process | in a worker process |
//! |---|---|---|
//! | a panic, too many steps, too much output | an error | an error |
//! | nesting that is too deep | an error | an error |
//! | a stack overflow or an abort in spite of these bounds | ends the program | an error |
//! | a call that takes more than some seconds | runs on | an error |
//! | memory of a call | not bounded | bounded on Linux |
//!
//! # Features
#![doc = document_features::document_features!()]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod chat;
mod error;
pub mod harmony;
mod stream;
mod tokenizer;
mod tokenizer_config;
mod worker;

pub use chat::{ChatTemplate, Message};
pub use error::{Failure, TextError};
pub use stream::TextStream;
pub use tokenizer::Tokenizer;
#[cfg(feature = "sandbox")]
pub use worker::init;
