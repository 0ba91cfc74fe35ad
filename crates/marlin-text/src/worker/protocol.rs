//! The messages between a program and its worker.
//!
//! A request is the length of its head and that of its body, 32 bits each, little-endian; the head,
//! a [`Head`] as JSON; the body, a text or a file as it is. A reply is its length and a `Result<_,
//! String>` as JSON.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::AddedToken;

/// A request to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// To compile the template that the body is.
    LoadTemplate {
        /// Their names in templates and their texts.
        special_tokens: BTreeMap<String, String>,
    },
    /// The text of a conversation.
    Render {
        messages: Vec<Value>,
        add_generation_prompt: bool,
    },
    /// To read the `tokenizer.json` that the body is; [`Loaded`].
    LoadTokenizer {
        /// The tokens to add to its own.
        tokens: ConfigTokens,
    },
    /// The tokens of the text that the body is.
    Encode { add_special_tokens: bool },
    /// The texts of sequences of tokens.
    Decode { sequences: Vec<Vec<u32>> },
    /// The token that the body is the text of, or none.
    TokenId,
    /// The text of a token in the tokenizer's vocabulary, or none.
    TokenText { id: u32 },
}

/// The tokens of the configs beside a `tokenizer.json`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct ConfigTokens {
    /// Added tokens in the order of what their configs number them. They get the numbers that
    /// follow the tokenizer's.
    pub added: BTreeMap<u32, AddedToken>,
    /// True if [`added`](Self::added) counts over the token of the same number in `tokenizer.json`.
    pub over_those_of_file: bool,
    /// Special tokens with a name.
    pub named: Vec<AddedToken>,
    /// Special tokens without one.
    pub extra: Vec<AddedToken>,
}

/// The facts of a tokenizer that are known once it is loaded.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Loaded {
    /// One more than the largest token.
    pub vocab_size: usize,
    /// Tokens that stand for no text.
    pub special: Vec<u32>,
    /// Tokens beside those of the tokenizer's algorithm.
    pub added: Vec<u32>,
}

/// The limits of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Limits {
    pub time: Duration,
    /// Memory of the worker, in bytes.
    pub bytes: u64,
}

/// A request and its limits.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Head {
    pub request: Request,
    pub limits: Limits,
}

impl Request {
    /// Returns the limits of a call with a body of this length.
    ///
    /// Measured in a debug build, beside another on two cores of an EPYC (Zen 5): a template takes
    /// 0.05 ms; a tokenizer of the size of Gemma 3's, the largest published (262144 tokens, 514906
    /// merges), 2.2 s and 420 MB to read; texts become tokens at 2 MB/s.
    pub fn limits(&self, body: usize) -> Limits {
        const MB: u64 = 1 << 20;
        const TIME: Duration = Duration::from_secs(4);
        let megabytes = (body >> 20) as u32;
        let per_megabyte = match self {
            Self::LoadTokenizer { .. } => Duration::from_millis(125),
            _ => Duration::from_secs(1),
        };
        let bytes = match self {
            Self::LoadTemplate { .. } | Self::Render { .. } => 256 * MB,
            _ => 768 * MB,
        };
        Limits {
            time: TIME + per_megabyte * megabytes,
            bytes,
        }
    }
}

/// Most bytes of a head, a body or a reply: more than any that the limits above allow for.
const MOST: usize = 1 << 30;

pub(crate) fn write_request(to: &mut impl Write, head: &Head, body: &[u8]) -> io::Result<()> {
    let head = serde_json::to_vec(head)?;
    let lengths = [length(&head)?, length(body)?].concat();
    to.write_all(&[&lengths, head.as_slice()].concat())?;
    to.write_all(body)?;
    to.flush()
}

/// The next request, or `None` if there are no more.
pub(crate) fn read_request(from: &mut impl Read) -> io::Result<Option<(Head, Vec<u8>)>> {
    let mut lengths = [0; 8];
    match from.read_exact(&mut lengths) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    let (head, body) = lengths.split_at(4);
    let head = serde_json::from_slice(&read_bytes(from, head)?)?;
    Ok(Some((head, read_bytes(from, body)?)))
}

pub(crate) fn write_reply(to: &mut impl Write, reply: &[u8]) -> io::Result<()> {
    to.write_all(&length(reply)?)?;
    to.write_all(reply)?;
    to.flush()
}

pub(crate) fn read_reply(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    read_bytes(from, &length)
}

fn length(bytes: &[u8]) -> io::Result<[u8; 4]> {
    match u32::try_from(bytes.len()) {
        Ok(length) if bytes.len() <= MOST => Ok(length.to_le_bytes()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} bytes at once", bytes.len()),
        )),
    }
}

/// As many bytes as the four before give.
fn read_bytes(from: &mut impl Read, length: &[u8]) -> io::Result<Vec<u8>> {
    let length = length
        .iter()
        .rev()
        .fold(0, |length, &byte| length << 8 | usize::from(byte));
    let mut bytes = Vec::new();
    from.take(length.min(MOST) as u64).read_to_end(&mut bytes)?;
    if bytes.len() == length {
        Ok(bytes)
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}
