//! The harmony format, in which gpt-oss models write: reasoning, content and calls of tools in
//! [messages](marlin_text::harmony).
//!
//! [`HarmonyParser`] divides an answer while it is generated. Texts of two messages of the same
//! kind are divided by an empty line.

mod conversation;
mod grammar;
mod parser;
#[cfg(test)]
mod tests;

pub(crate) use conversation::Adapted;
pub(crate) use grammar::{calls_grammar, final_grammar};
pub use parser::{HarmonyDelta, HarmonyParser};
