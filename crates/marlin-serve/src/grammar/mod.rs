//! Grammars that the text of an answer must follow: a JSON schema, a regular expression, or a Lark
//! grammar. They are compiled and followed by [`llguidance`].
//!
//! - [`GrammarCompiler`] compiles grammars for the vocabulary of a model, and keeps the last ones.
//! - [`Grammar`] is a compiled grammar, which sequences share.
//! - [`GrammarState`] follows the text of one sequence: before each step it gives the
//!   [mask](GrammarState::mask) of the tokens that may come next, after it takes the
//!   [token](GrammarState::accept) that came.
//!
//! # What is bounded
//!
//! A grammar comes with a request, and may be made to harm.
//!
//! | | bound |
//! |---|---|
//! | the text of a grammar | [`MAX_GRAMMAR_BYTES`] |
//! | the time to compile it | [`CompilerOptions::time_limit`] |
//! | the number of grammars being compiled | [`CompilerOptions::max_running`] |
//! | nesting and references | as deep as the text allows, on a thread with a stack for that |
//! | the size of the compiled grammar, its lexer and each step | `llguidance`'s limits, lowered: a mask that reaches them takes some 0.2 s, and the sequence ends with an error |
//!
//! Measured on two cores of a busy server, for a vocabulary of 128,000 made-up tokens: a mask of a
//! JSON schema takes 34 us on average and at most 4 ms, one of a regular expression with
//! `[a-z ]{3,200}` 3 ms on average; for 32,000 tokens 16 us and 0.5 ms. Starting a sequence takes
//! 50 us.
//!
//! A grammar that no text matches is refused, and so is a schema with a cycle of references that
//! leads to no value.

mod compiler;
mod schema;
mod state;
#[cfg(test)]
mod tests;
mod vocabulary;

pub use compiler::{CompilerOptions, Grammar, GrammarCompiler};
pub use state::GrammarState;

use std::time::Duration;

/// The most bytes of the text of a grammar.
pub const MAX_GRAMMAR_BYTES: usize = 128 << 10;

/// The text of a grammar.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum GrammarSource {
    /// A JSON schema, as JSON. References to other documents are refused, and so are keywords that
    /// `llguidance` does not know.
    JsonSchema(String),
    /// A regular expression in the syntax of the crate `regex`, which the whole text must match.
    Regex(String),
    /// A grammar in `llguidance`'s variant of Lark.
    Lark(String),
}

impl GrammarSource {
    /// Returns the grammar of any object of JSON.
    pub fn json_object() -> Self {
        Self::JsonSchema(r#"{"type":"object"}"#.into())
    }

    /// Returns the grammar of an answer that begins with reasoning: any text up to `end`, such as
    /// `</think>`, then up to two line breaks, then what this grammar allows. `token` is the token
    /// of `end`, if the vocabulary [has one](GrammarCompiler::token_id).
    #[must_use]
    pub fn after_reasoning(&self, end: &str, token: Option<u32>) -> Self {
        let answer = self.lark_expression();
        let reasoning = match token {
            Some(id) => format!("reasoning: TEXT? <[{id}]>\nTEXT: /(?s:.+)/"),
            None => {
                let end = serde_json::Value::from(end);
                format!("reasoning[suffix={end}]: /(?s:.*)/")
            }
        };
        Self::Lark(format!(
            "start: reasoning BREAK? answer\n{reasoning}\nBREAK: /\\n\\n?/\nanswer: {answer}\n"
        ))
    }

    /// Returns the grammar as an expression of Lark, which a rule of another grammar can hold.
    pub fn lark_expression(&self) -> String {
        match self {
            Self::JsonSchema(text) => format!("%json {text}"),
            Self::Regex(text) => format!("/{}/", llguidance::regex_to_lark(text, "")),
            Self::Lark(text) => format!("%lark {{\n{text}\n}}"),
        }
    }

    /// Returns the text.
    pub fn text(&self) -> &str {
        let (Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text)) = self;
        text
    }
}

/// A grammar cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The text is too long.
    #[error("the grammar has {bytes} bytes; it may have at most {MAX_GRAMMAR_BYTES}")]
    TooLong {
        /// The number of bytes.
        bytes: usize,
    },
    /// A JSON schema is not JSON.
    #[error("the JSON schema is not valid JSON: {0}")]
    Json(serde_json::Error),
    /// The text is not a grammar, has what is not supported, or is too complex.
    #[error("the grammar is refused: {0}")]
    Refused(String),
    /// No text matches.
    #[error("no text matches the grammar")]
    Empty,
    /// The grammar takes too long to compile.
    #[error("the grammar is too complex: it was not compiled within {limit:?}")]
    TimeOut {
        /// The time that it may take.
        limit: Duration,
    },
    /// Too many grammars are being compiled.
    #[error("{running} grammars are being compiled, which is the most; try again")]
    Busy {
        /// The number of grammars.
        running: usize,
    },
    /// A token that the grammar does not allow, or a text for which it is too complex.
    #[error("the grammar does not go on after the text so far: {0}")]
    Stuck(String),
    /// The model has no token that ends a text.
    #[error("the model has no end-of-sequence token, which ends a text with a grammar")]
    NoStopToken,
    /// The bytes of the tokenizer's tokens are not known.
    #[error(transparent)]
    Tokenizer(#[from] marlin_text::TextError),
    /// The compilation panicked.
    #[error("the compilation of the grammar panicked")]
    Panicked,
    /// No thread could be started.
    #[error("no thread for the compilation of a grammar could be started: {0}")]
    Thread(std::io::Error),
}

impl GrammarError {
    /// Returns true if the grammar is at fault, not the model or the machine.
    pub fn is_of_grammar(&self) -> bool {
        match self {
            Self::TooLong { .. }
            | Self::Json(_)
            | Self::Refused(_)
            | Self::Empty
            | Self::TimeOut { .. }
            | Self::Stuck(_) => true,
            Self::Busy { .. }
            | Self::NoStopToken
            | Self::Tokenizer(_)
            | Self::Panicked
            | Self::Thread(_) => false,
        }
    }
}

/// Returns the message of an error of `llguidance` without its state and its backtrace, and not
/// longer than a client can read.
fn message(error: &impl std::fmt::Display) -> String {
    const LONGEST: usize = 500;
    let text = error.to_string();
    let end = ["\n<non-verbose/>", "\n<state>", "\n<backtrace>"]
        .iter()
        .filter_map(|mark| text.find(mark))
        .min();
    text[..end.unwrap_or(text.len())]
        .chars()
        .take(LONGEST)
        .collect()
}
