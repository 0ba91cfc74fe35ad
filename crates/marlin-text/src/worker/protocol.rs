//! The messages between a program and its worker.
//!
//! A request consists of the lengths of its head and its body, 32 bits each, little-endian; the
//! head, a [`Head`] as JSON; and the body, the bytes of a text or a file. A reply is its length and
//! a `Result<_, String>` as JSON.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::AddedToken;

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
    /// Measured in a debug build, with another one running beside it on two cores of an EPYC (Zen
    /// 5): a template takes 0.05 ms; reading a tokenizer of the size of Gemma 3's, the largest
    /// published (262144 tokens, 514906 merges), takes 2.2 s and 420 MB; texts are encoded at 2
    /// MB/s.
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

/// The largest number of bytes of a head, a body or a reply; more than the limits above allow.
const MOST: usize = 1 << 30;

pub(crate) fn write_request(to: &mut impl Write, head: &Head, body: &[u8]) -> io::Result<()> {
    let head = serde_json::to_vec(head)?;
    let lengths = [length(&head)?, length(body)?].concat();
    to.write_all(&[&lengths, head.as_slice()].concat())?;
    to.write_all(body)?;
    to.flush()
}

/// Reads the next request; `None` if there are no more.
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

/// Reads a number of bytes, which is given by the four bytes of `length` in little-endian order.
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
