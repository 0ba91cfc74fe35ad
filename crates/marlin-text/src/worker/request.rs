//! What a worker is asked, and what it answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::template::{FUEL, MAX_RENDERED_BYTES, MAX_TEMPLATE_BYTES};
use crate::Failure;

/// A request to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Compiles the template in the body.
    LoadTemplate {
        /// The names of special tokens in templates, and their texts.
        special_tokens: BTreeMap<String, String>,
    },
    /// Renders a conversation to text.
    Render {
        messages: Vec<Value>,
        /// Further variables of the template, such as `tools`.
        variables: Map<String, Value>,
        add_generation_prompt: bool,
    },
    /// Loads the `tokenizer.json` in the body. The reply is [`Loaded`].
    LoadTokenizer {
        /// The tokens to add to those of the tokenizer.
        tokens: ConfigTokens,
    },
    /// Encodes the text in the body.
    Encode { add_special_tokens: bool },
    /// Decodes sequences of tokens.
    Decode { sequences: Vec<Vec<u32>> },
    /// Looks up the token whose text is the body. The reply is `None` if there is no such token.
    TokenId,
    /// Looks up the text of a token in the tokenizer's vocabulary. The reply is `None` if there is
    /// no such token.
    TokenText { id: u32 },
    /// Returns the ids of all tokens in ascending order, each with its bytes.
    Vocabulary,
    /// Returns, by token id, the texts of tokens that do not depend on the tokens around them.
    PlainTexts,
}

/// The tokens of the configs beside a `tokenizer.json`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct ConfigTokens {
    /// Added tokens by their ids in the configs. These ids only give the order: the tokens get the
    /// ids that follow those of the tokenizer.
    pub added: BTreeMap<u32, AddedToken>,
    /// True if a token of [`added`](Self::added) takes precedence over the token of the same id in
    /// `tokenizer.json`.
    pub over_those_of_file: bool,
    /// Special tokens with a name.
    pub named: Vec<AddedToken>,
    /// Special tokens without a name.
    pub extra: Vec<AddedToken>,
}

/// The properties of a loaded tokenizer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Loaded {
    /// One more than the largest token id.
    pub vocab_size: usize,
    /// The special tokens, which decoding skips.
    pub special: Vec<u32>,
    /// Tokens added to those of the tokenizer's algorithm.
    pub added: Vec<u32>,
}

/// The reason why a worker does not fulfil a request. A reply is a `Result<_, Refusal>` as JSON.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// The template or tokenizer is not valid, or refuses its input.
    Message(String),
    /// The request panicked with this message.
    Panic(String),
    /// The template took more steps than it may.
    Steps,
    /// The template, or a value that it makes, is nested too deeply.
    Nesting,
    /// The template wrote more text than it may.
    Output,
    /// The template is longer than it may be.
    Length {
        /// The length in bytes.
        bytes: usize,
    },
}

impl From<String> for Refusal {
    fn from(message: String) -> Self {
        Self::Message(message)
    }
}

impl From<&str> for Refusal {
    fn from(message: &str) -> Self {
        Self::Message(message.into())
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Message(message) => Self::Refused(message),
            Refusal::Panic(message) => Self::Panicked(message),
            Refusal::Steps => Self::Steps { limit: FUEL },
            Refusal::Nesting => Self::Nesting,
            Refusal::Output => Self::Output {
                limit: MAX_RENDERED_BYTES,
            },
            Refusal::Length { bytes } => Self::Length {
                bytes,
                limit: MAX_TEMPLATE_BYTES,
            },
        }
    }
}
