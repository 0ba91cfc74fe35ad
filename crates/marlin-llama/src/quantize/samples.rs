//! Calibration text to samples.

use std::path::{Path, PathBuf};

use marlin_text::{ChatTemplate, Message, TextError, Tokenizer};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::Deserialize;

use crate::LlamaError;

/// How many samples calibration takes, and which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleOptions {
    /// Samples.
    pub samples: usize,
    /// Tokens of the longest sample.
    pub max_len: usize,
    /// Of more samples than are asked for, those that this seed draws are taken.
    pub seed: u64,
}

impl Default for SampleOptions {
    /// 128 samples of up to 2048 tokens.
    fn default() -> Self {
        Self { samples: 128, max_len: 2048, seed: 0 }
    }
}

/// A line of a JSONL file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Text { text: String },
    Chat { messages: Vec<Message> },
}

/// The tokens of samples from files: text; `.jsonl`, a document in `text` on each line; or chat `.jsonl`, a conversation in `messages` on each line, which goes
/// through `template`.
///
/// Each document is cut into samples of `max_len` tokens, the last of them shorter: documents are not joined, and there is no padding. A last one of fewer than
/// 16 tokens is left out.
///
/// # Errors
/// [`LlamaError::Io`]; [`LlamaError::CalibrationLine`]; [`LlamaError::Text`]; [`LlamaError::FewSamples`].
pub fn calibration_samples(
    files: &[PathBuf],
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    options: &SampleOptions,
) -> Result<Vec<Vec<u32>>, LlamaError> {
    /// A shorter rest of a document says little.
    const SHORTEST: usize = 16;
    let max_len = options.max_len.max(1);
    let mut samples = Vec::new();
    for path in files {
        for document in documents(path, tokenizer, template)? {
            let parts = document.chunks(max_len).filter(|part| part.len() >= SHORTEST.min(max_len));
            samples.extend(parts.map(<[u32]>::to_vec));
        }
    }
    if samples.len() < options.samples {
        return Err(LlamaError::FewSamples { asked: options.samples, found: samples.len(), max_len });
    }
    samples.shuffle(&mut StdRng::seed_from_u64(options.seed));
    samples.truncate(options.samples);
    Ok(samples)
}

/// The tokens of each document of a file.
fn documents(path: &Path, tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Result<Vec<Vec<u32>>, LlamaError> {
    let bytes = std::fs::read(path).map_err(|source| LlamaError::io("read", path, source))?;
    let text = String::from_utf8(bytes)
        .map_err(|error| LlamaError::io("read", path, std::io::Error::new(std::io::ErrorKind::InvalidData, error)))?;
    if path.extension().is_none_or(|extension| extension != "jsonl") {
        return Ok(vec![tokens_of(&text, tokenizer)?]);
    }
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| {
            let invalid = |reason: &str| LlamaError::CalibrationLine { path: path.into(), line: index + 1, reason: reason.into() };
            let tokens: Result<Vec<u32>, TextError> = match serde_json::from_str(line) {
                Ok(Line::Text { text }) => tokenizer.encode(&text),
                Ok(Line::Chat { messages }) => {
                    let template = template.ok_or_else(|| invalid("a conversation, for a model without a chat template; give text"))?;
                    template.render(&messages, false).and_then(|text| tokenizer.encode_rendered(&text))
                }
                Err(_) => return Err(invalid("it is no JSON object with a string `text`, or with `messages` of `role` and `content`")),
            };
            Ok(tokens?)
        })
        .collect()
}

/// The tokens of a text of any length, in pieces that end with a line.
fn tokens_of(text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, TextError> {
    /// Bytes of a piece: the tokenizer's memory is limited.
    const PIECE: usize = 1 << 18;
    let mut tokens = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let limit = rest.floor_char_boundary(PIECE);
        let end = if limit == rest.len() { limit } else { rest[..limit].rfind('\n').map_or(limit, |line| line + 1) };
        let (piece, after) = rest.split_at(end);
        // What starts a text is added to the first piece alone.
        tokens.extend(if tokens.is_empty() { tokenizer.encode(piece)? } else { tokenizer.encode_rendered(piece)? });
        rest = after;
    }
    Ok(tokens)
}
