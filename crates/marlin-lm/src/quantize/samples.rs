//! Conversion of calibration text to samples.

use std::path::{Path, PathBuf};

use marlin_format::with_causes;
use marlin_text::{ChatTemplate, Failure, TextError, Tokenizer};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::ModelError;

/// Options that choose the calibration samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleOptions {
    /// The number of samples.
    pub samples: usize,
    /// The number of tokens of the longest sample.
    pub max_len: usize,
    /// The seed that draws the samples, if the texts have more than are requested.
    pub seed: u64,
}

impl Default for SampleOptions {
    /// Returns options for 128 samples of up to 2048 tokens.
    fn default() -> Self {
        Self {
            samples: 128,
            max_len: 2048,
            seed: 0,
        }
    }
}

/// A line of a JSONL file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Text { text: String },
    Chat { messages: Vec<Map<String, Value>> },
}

/// The reason why a line is not a document.
enum Fault {
    /// The line does not have the expected form.
    Invalid(&'static str),
    /// The line is a conversation that the model does not support: its template refuses it, or a
    /// part is not text.
    LeftOut(String),
    Failed(TextError),
}

/// Reads calibration samples, as tokens, from files: text; `.jsonl` with a document in `text` on
/// each line; or chat `.jsonl` with a conversation in `messages` on each line, which `template`
/// renders.
///
/// A message's content is text, a list of parts `{"type": "text", "text": ..}`, or, beside
/// `tool_calls`, `null`. Conversations with other parts, or that the template refuses, are left
/// out, and a warning gives their number. A byte order mark at the start of a file is skipped.
///
/// Each document is cut into samples of `max_len` tokens, the last of them shorter: documents are
/// not joined, and there is no padding. A last sample of fewer than 16 tokens is left out.
///
/// # Errors
/// [`ModelError::Io`]; [`ModelError::CalibrationLine`]; [`ModelError::Text`];
/// [`ModelError::FewSamples`].
pub fn calibration_samples(
    files: &[PathBuf],
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    options: &SampleOptions,
) -> Result<Vec<Vec<u32>>, ModelError> {
    /// The fewest tokens of a sample. A shorter rest of a document contributes little.
    const SHORTEST: usize = 16;
    let max_len = options.max_len.max(1);
    let mut samples = Vec::new();
    for path in files {
        for document in documents(path, tokenizer, template)? {
            let parts = document
                .chunks(max_len)
                .filter(|part| part.len() >= SHORTEST.min(max_len));
            samples.extend(parts.map(<[u32]>::to_vec));
        }
    }
    if samples.len() < options.samples {
        return Err(ModelError::FewSamples {
            asked: options.samples,
            found: samples.len(),
            max_len,
        });
    }
    samples.shuffle(&mut StdRng::seed_from_u64(options.seed));
    samples.truncate(options.samples);
    Ok(samples)
}

/// Returns the tokens of each document of a file. Conversations that the model does not support are
/// left out; a warning gives their number.
fn documents(
    path: &Path,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Result<Vec<Vec<u32>>, ModelError> {
    let bytes = std::fs::read(path).map_err(|source| ModelError::io("read", path, source))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        ModelError::io(
            "read",
            path,
            std::io::Error::new(std::io::ErrorKind::InvalidData, error),
        )
    })?;
    // A byte order mark, as editors on Windows write it.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    if path
        .extension()
        .is_none_or(|extension| extension != "jsonl")
    {
        return Ok(vec![tokens_of(text, tokenizer, Start::Text)?]);
    }
    let mut documents = Vec::new();
    let mut left_out: Option<(usize, String)> = None;
    let mut count = 0;
    for (index, line) in text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        match document(line, tokenizer, template) {
            Ok(tokens) => documents.push(tokens),
            Err(Fault::Invalid(reason)) => {
                return Err(ModelError::CalibrationLine {
                    path: path.into(),
                    line: index + 1,
                    reason: reason.into(),
                });
            }
            Err(Fault::Failed(error)) => return Err(error.into()),
            Err(Fault::LeftOut(reason)) => {
                count += 1;
                left_out.get_or_insert((index + 1, reason));
            }
        }
    }
    if let Some((line, reason)) = left_out {
        tracing::warn!(file = %path.display(), left_out = count, used = documents.len(), line, %reason, "conversations are left out of the calibration text");
    }
    Ok(documents)
}

/// Returns the tokens of a line.
fn document(
    line: &str,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Result<Vec<u32>, Fault> {
    let messages = match serde_json::from_str(line) {
        Ok(Line::Text { text }) => {
            return tokens_of(&text, tokenizer, Start::Text).map_err(Fault::Failed);
        }
        Ok(Line::Chat { messages }) => messages,
        Err(_) => {
            return Err(Fault::Invalid(
                "it is no JSON object with a string `text`, or with `messages`, a list of objects",
            ));
        }
    };
    let template = template.ok_or(Fault::Invalid(
        "a conversation, for a model without a chat template; give text",
    ))?;
    let messages = messages
        .into_iter()
        .map(message)
        .collect::<Result<_, _>>()?;
    let text = match template.render_json(messages, false) {
        Ok(text) => text,
        Err(
            error @ TextError::ChatTemplate {
                source:
                    Failure::Refused(_)
                    | Failure::Panicked(_)
                    | Failure::Steps { .. }
                    | Failure::Output { .. },
                ..
            },
        ) => return Err(Fault::LeftOut(with_causes(&error))),
        Err(error) => return Err(Fault::Failed(error)),
    };
    tokens_of(&text, tokenizer, Start::Rendered).map_err(Fault::Failed)
}

/// Converts a message to the form that chat templates expect: the content as one text, which is
/// empty beside tool calls, and the arguments of tool calls as objects. In files the content may
/// also be a list of parts, `null` or missing, and the arguments may be the text of an object, as
/// in the chat completions API.
fn message(mut fields: Map<String, Value>) -> Result<Value, Fault> {
    if !fields.get("role").is_some_and(Value::is_string) {
        return Err(Fault::Invalid("a message has no string `role`"));
    }
    let has_calls = fields.get("tool_calls").is_some_and(Value::is_array);
    let content = match fields.remove("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => parts.iter().map(text_of).collect::<Result<_, _>>()?,
        Some(Value::Null) => String::new(),
        None if has_calls => String::new(),
        _ => {
            return Err(Fault::Invalid(
                "a message has no `content` that is text, or a list of parts",
            ));
        }
    };
    fields.insert("content".into(), content.into());
    for call in fields
        .get_mut("tool_calls")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        let Some(arguments) = call.pointer_mut("/function/arguments") else {
            continue;
        };
        if let Some(object @ Value::Object(_)) = arguments
            .as_str()
            .and_then(|text| serde_json::from_str(text).ok())
        {
            *arguments = object;
        }
    }
    Ok(fields.into())
}

/// Returns the text of a part of a message.
fn text_of(part: &Value) -> Result<&str, Fault> {
    match part
        .as_str()
        .or_else(|| part["text"].as_str().filter(|_| part["type"] == "text"))
    {
        Some(text) => Ok(text),
        None => Err(Fault::LeftOut(format!(
            "a message has a part of type {}; only text is used",
            part["type"]
        ))),
    }
}

/// The tokens that a text starts with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// The tokens that the tokenizer adds.
    Text,
    /// The tokens that the chat template wrote.
    Rendered,
}

/// Encodes a text of any length, in pieces that end with a line.
fn tokens_of(text: &str, tokenizer: &Tokenizer, start: Start) -> Result<Vec<u32>, TextError> {
    /// The largest number of bytes in a piece: the tokenizer's memory is limited.
    const PIECE: usize = 1 << 18;
    let mut tokens = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let limit = rest.floor_char_boundary(PIECE);
        let end = if limit == rest.len() {
            limit
        } else {
            rest[..limit].rfind('\n').map_or(limit, |line| line + 1)
        };
        let (piece, after) = rest.split_at(end);
        // The tokens that start a text are added only to the first piece.
        let is_first = start == Start::Text && tokens.is_empty();
        tokens.extend(if is_first {
            tokenizer.encode(piece)?
        } else {
            tokenizer.encode_rendered(piece)?
        });
        rest = after;
    }
    Ok(tokens)
}
