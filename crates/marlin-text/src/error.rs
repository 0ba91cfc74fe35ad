//! The errors of chat templates and tokenizers.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A chat template or a tokenizer that cannot be read or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file that the operating system could not read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file that is not valid JSON, or whose JSON has another form than expected.
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
        /// The file with the template.
        path: PathBuf,
        /// The cause.
        source: Failure,
    },
    /// A `chat_template` that is neither a string nor a list with a template named `default`.
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
        /// The token's id.
        id: u32,
        /// The number of tokens in the model's vocabulary.
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
    /// The template or tokenizer is not valid, or refuses its input, with this message.
    #[error("{0}")]
    Refused(String),
    /// The call exceeded its time limit, which only worker processes have.
    #[error("it was stopped after {:.1} s; is it made to run forever?", after.as_secs_f32())]
    Time {
        /// The time limit of the call.
        after: Duration,
    },
    /// The call exceeded its memory limit, which only worker processes have.
    #[error("it asks for more than the {} MiB of memory that it may have", limit >> 20)]
    Memory {
        /// The memory limit, in bytes.
        limit: u64,
    },
    /// The template took more steps than it may.
    #[error("it takes more than {limit} steps; is it made to run forever?")]
    Steps {
        /// The largest number of steps of a call.
        limit: u64,
    },
    /// The template or tokenizer recurses, or is nested, too deeply, or until the stack is used up.
    #[error("it is nested too deeply, or without end")]
    Nesting,
    /// The template wrote more text than it may.
    #[error("it writes more than {} MiB of text", limit >> 20)]
    Output {
        /// The largest number of bytes of a rendered conversation.
        limit: usize,
    },
    /// The template's text is too long.
    #[error("it has {bytes} bytes, of at most {limit}")]
    Length {
        /// The length in bytes.
        bytes: usize,
        /// The largest number of bytes of a template.
        limit: usize,
    },
    /// The code that runs the template or tokenizer panicked with this message.
    #[error("it panicked: {0}")]
    Panicked(String),
    /// The thread that the template or tokenizer runs on could not be started.
    #[error("the thread that it runs on cannot be started")]
    Thread(#[source] io::Error),
    /// The file of the tokenizer could not be read again when a new worker was started.
    #[error("its file cannot be read")]
    File(#[source] io::Error),
    /// The worker process could not be started, or it ended for another reason.
    #[error("the process that it runs in {what}")]
    Worker {
        /// The failure.
        what: String,
    },
}
