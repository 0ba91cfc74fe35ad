//! The workers that run templates and tokenizers of unknown origin.

mod local;
mod oniguruma;
mod request;
#[cfg(feature = "sandbox")]
mod sandbox;
mod session;
mod template;
mod tokenizer;
mod vocabulary;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use marlin_format::checkpoint::{MAX_TOKENIZER_BYTES, read_file};
use serde::de::DeserializeOwned;

use self::local::Local;
use self::request::Refusal;
pub(crate) use self::request::{ConfigTokens, Loaded, Request};
#[cfg(feature = "sandbox")]
pub use self::sandbox::init;
use crate::Failure;

/// The template or tokenizer that a worker runs.
#[derive(Debug)]
pub(crate) enum Subject {
    Template {
        text: String,
        special_tokens: BTreeMap<String, String>,
    },
    Tokenizer {
        /// The path of a `tokenizer.json`.
        path: PathBuf,
        /// The tokens of the configs beside it.
        tokens: ConfigTokens,
    },
}

impl Subject {
    /// Returns the request that loads the subject, and the request's body.
    fn load(&self) -> Result<(Request, Vec<u8>), Failure> {
        Ok(match self {
            Self::Template {
                text,
                special_tokens,
            } => (
                Request::LoadTemplate {
                    special_tokens: special_tokens.clone(),
                },
                text.clone().into_bytes(),
            ),
            Self::Tokenizer { path, tokens } => (
                Request::LoadTokenizer {
                    tokens: tokens.clone(),
                },
                read_file(path, MAX_TOKENIZER_BYTES).map_err(Failure::File)?,
            ),
        })
    }
}

/// A template or a tokenizer, loaded in a worker process or in the program's own process.
#[derive(Debug)]
pub(crate) struct Worker {
    subject: Subject,
    /// The place where the subject runs; `None` between a failure that ended it and the next call.
    place: Mutex<Option<Place>>,
}

/// The place where a worker runs.
#[derive(Debug)]
enum Place {
    /// The program's own process.
    Local(Box<Local>),
    /// A process of its own.
    #[cfg(feature = "sandbox")]
    Process(sandbox::Process),
}

impl Worker {
    /// Loads a subject and returns the worker and its reply.
    pub fn open<T: DeserializeOwned>(subject: Subject) -> Result<(Self, T), Failure> {
        let (place, reply) = start(&subject)?;
        let worker = Self {
            subject,
            place: Mutex::new(Some(place)),
        };
        Ok((worker, reply))
    }

    /// Sends a request and returns the reply. Starts a new worker if the last one ended or
    /// panicked.
    pub fn call<T: DeserializeOwned>(&self, request: Request, body: &[u8]) -> Result<T, Failure> {
        let mut slot = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        let mut place = match slot.take() {
            Some(place) => place,
            None => start::<serde::de::IgnoredAny>(&self.subject)?.0,
        };
        let reply = decode(&place.call(request, body)?);
        // A panic may have left the state of a template or a tokenizer inconsistent.
        if !matches!(reply, Err(Failure::Panicked(_))) {
            *slot = Some(place);
        }
        reply
    }
}

/// Loads a subject in a new place and returns the place and its reply.
fn start<T: DeserializeOwned>(subject: &Subject) -> Result<(Place, T), Failure> {
    let mut place = Place::start()?;
    let (request, body) = subject.load()?;
    let reply = decode(&place.call(request, &body)?)?;
    Ok((place, reply))
}

impl Place {
    /// Starts a process if the program allows it, else makes a session in the program's own.
    fn start() -> Result<Self, Failure> {
        #[cfg(feature = "sandbox")]
        if sandbox::is_on() {
            return sandbox::Process::start().map(Self::Process);
        }
        Ok(Self::Local(Box::default()))
    }

    /// Sends a request and returns the reply as JSON.
    fn call(&mut self, request: Request, body: &[u8]) -> Result<Vec<u8>, Failure> {
        match self {
            Self::Local(local) => local.call(request, body),
            #[cfg(feature = "sandbox")]
            Self::Process(process) => process.call(request, body),
        }
    }
}

fn decode<T: DeserializeOwned>(reply: &[u8]) -> Result<T, Failure> {
    let reply: Result<T, Refusal> =
        serde_json::from_slice(reply).map_err(|error| Failure::Worker {
            what: format!("gave a reply that is none: {error}"),
        })?;
    reply.map_err(Failure::from)
}
