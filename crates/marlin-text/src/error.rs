//! The errors of the texts of a folder.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A chat template or a tokenizer that cannot be read or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The operating system refused.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file that is not the JSON it should be.
    #[error("{} does not hold what it should", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The position and the cause.
        source: serde_json::Error,
    },
    /// A chat template that cannot be compiled, or that refuses a conversation.
    #[error("the chat template of {}", path.display())]
    ChatTemplate {
        /// The file that holds it.
        path: PathBuf,
        /// The cause.
        source: Failure,
    },
    /// A `chat_template` that is no text and names no default.
    #[error("`chat_template` in {} holds {found}; it must be a text, or a list with one named `default`", path.display())]
    ChatTemplateField {
        /// The file.
        path: PathBuf,
        /// The value.
        found: String,
    },
    /// A tokenizer that cannot be read or used.
    #[error("the tokenizer {}", path.display())]
    Tokenizer {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// The cause.
        source: Failure,
    },
    /// A text with a token that the model does not have.
    #[error(
        "the text has `{token}`, token {id} of {}; the model's vocabulary has {vocab_size} tokens: leave it out, or take the tokenizer of this model",
        path.display()
    )]
    TokenOutsideVocabulary {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// The token's text in the tokenizer.
        token: String,
        /// The token.
        id: u32,
        /// Tokens in the model's vocabulary.
        vocab_size: usize,
    },
}

impl TextError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io {
            path: path.into(),
            source,
        }
    }
}

/// The reason why a template or a tokenizer failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// It is not valid, or refuses its input, with this message.
    #[error("{0}")]
    Refused(String),
    /// It took longer than a call may.
    #[error("it was stopped after {:.1} s; is it made to run forever?", after.as_secs_f32())]
    Time {
        /// The time that the call had.
        after: Duration,
    },
    /// It requested more memory than a call may have.
    #[error("it asks for more than the {} MB of memory that it may have", limit >> 20)]
    Memory {
        /// Bytes that it may have.
        limit: u64,
    },
    /// It recurses, or is nested, until the stack is used up.
    #[error("it is nested too deeply, or without end")]
    Nesting,
    /// Its file could not be read again.
    #[error("its file cannot be read")]
    File(#[source] io::Error),
    /// There is no worker process, or it ended in another way.
    #[error("the process that it runs in {what}")]
    Worker {
        /// The failure.
        what: String,
    },
}
