//! The messages between a program and its worker process.
//!
//! A request consists of the lengths of its head and its body, 32 bits each, little-endian; the
//! head, a [`Head`] as JSON; and the body, the bytes of a text or a file. A reply is its length and
//! the JSON of [`Session::answer`](crate::worker::session::Session::answer).

use std::io::{self, Read, Write};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::worker::request::Request;

/// The limits of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Limits {
    pub time: Duration,
    /// Memory of the worker, in bytes.
    pub bytes: u64,
}

/// A request and its limits.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Head {
    pub request: Request,
    pub limits: Limits,
}

impl Limits {
    /// Returns the limits of a call with a body of this length.
    ///
    /// Measured in a debug build, with another one running beside it on two cores of an EPYC (Zen
    /// 5): a template takes 0.05 ms; reading a tokenizer of the size of Gemma 3's, the largest
    /// published (262144 tokens, 514906 merges), takes 2.2 s and 420 MB; texts are encoded at 2
    /// MB/s.
    pub fn of(request: &Request, body: usize) -> Self {
        let megabytes = (body >> 20) as u32;
        let per_megabyte = match request {
            Request::LoadTokenizer { .. } => Duration::from_millis(125),
            _ => Duration::from_secs(1),
        };
        let bytes = match request {
            Request::LoadTemplate { .. } | Request::Render { .. } => TEMPLATE_MEMORY,
            _ => TOKENIZER_MEMORY,
        };
        Self {
            time: TIME + per_megabyte * megabytes,
            bytes,
        }
    }
}

/// The time for a call, besides that for its body.
const TIME: Duration = Duration::from_secs(4);
/// The largest number of bytes of a process that compiles or renders a template.
const TEMPLATE_MEMORY: u64 = 256 << 20;
/// The largest number of bytes of a process that has a tokenizer.
const TOKENIZER_MEMORY: u64 = 768 << 20;

/// The largest number of bytes of a head, a body or a reply; more than the limits above allow.
const MOST: usize = 1 << 30;

pub(super) fn write_request(to: &mut impl Write, head: &Head, body: &[u8]) -> io::Result<()> {
    let head = serde_json::to_vec(head)?;
    let lengths = [length(&head)?, length(body)?].concat();
    to.write_all(&[&lengths, head.as_slice()].concat())?;
    to.write_all(body)?;
    to.flush()
}

/// Reads the next request; `None` if there are no more.
pub(super) fn read_request(from: &mut impl Read) -> io::Result<Option<(Head, Vec<u8>)>> {
    let mut lengths = [0; 8];
    match from.read_exact(&mut lengths) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    let (head, body) = lengths.split_at(4);
    let head = serde_json::from_slice(&read_bytes(from, head)?)?;
    Ok(Some((head, read_bytes(from, body)?)))
}

pub(super) fn write_reply(to: &mut impl Write, reply: &[u8]) -> io::Result<()> {
    to.write_all(&length(reply)?)?;
    to.write_all(reply)?;
    to.flush()
}

pub(super) fn read_reply(from: &mut impl Read) -> io::Result<Vec<u8>> {
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
