//! The workers that run templates and tokenizers of unknown origin.

mod child;
mod oniguruma;
mod process;
mod protocol;
mod session;
mod template;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use marlin_format::checkpoint::{MAX_TOKENIZER_BYTES, read_file};
use serde::de::DeserializeOwned;

use self::process::Process;
pub(crate) use self::protocol::{ConfigTokens, Loaded, Request};
use self::protocol::{Head, Limits};
use self::session::Session;
use crate::Failure;

/// True if workers are processes: the program's `main` handles the argument that starts a worker.
static PROCESSES: AtomicBool = AtomicBool::new(false);

/// Lets chat templates and tokenizers run in separate processes, which are started from this
/// program's executable. Call it first in `main`: in a worker process it does not return.
///
/// A program that does not call `init` runs templates and tokenizers in its own process. That is
/// safe only for folders that the program created itself, or trusts.
pub fn init() {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|argument| argument == process::ARGUMENT)
    {
        child::run();
    }
    PROCESSES.store(true, Ordering::Relaxed);
}

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
    /// The place where the subject runs; `None` between the end of a process and the next call.
    place: Mutex<Option<Place>>,
}

/// The place where a worker runs.
#[derive(Debug)]
enum Place {
    Process(Process),
    /// The worker runs in the program's own process.
    Here(Box<Session>),
}

impl Worker {
    /// Loads a subject and returns the worker and its reply.
    pub fn open<T: DeserializeOwned>(subject: Subject) -> Result<(Self, T), Failure> {
        let (place, reply) = start(&subject)?;
        Ok((
            Self {
                subject,
                place: Mutex::new(Some(place)),
            },
            decode(&reply)?,
        ))
    }

    /// Sends a request and returns the reply. Starts a new worker if the last one ended.
    pub fn call<T: DeserializeOwned>(&self, request: Request, body: &[u8]) -> Result<T, Failure> {
        let mut slot = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        let mut place = match slot.take() {
            Some(place) => place,
            None => start(&self.subject)?.0,
        };
        let reply = place.call(request, body)?;
        *slot = Some(place);
        decode(&reply)
    }
}

fn start(subject: &Subject) -> Result<(Place, Vec<u8>), Failure> {
    let mut place = match PROCESSES.load(Ordering::Relaxed) {
        true => Place::Process(Process::start()?),
        false => Place::Here(Box::default()),
    };
    let (request, body) = subject.load()?;
    let reply = place.call(request, &body)?;
    Ok((place, reply))
}

impl Place {
    fn call(&mut self, request: Request, body: &[u8]) -> Result<Vec<u8>, Failure> {
        let limits = request.limits(body.len());
        match self {
            Self::Process(process) => process.call(&Head { request, limits }, body),
            Self::Here(session) => Ok(session.answer(request, body)),
        }
    }
}

fn decode<T: DeserializeOwned>(reply: &[u8]) -> Result<T, Failure> {
    let reply: Result<T, String> =
        serde_json::from_slice(reply).map_err(|error| Failure::Worker {
            what: format!("gave a reply that is none: {error}"),
        })?;
    reply.map_err(Failure::Refused)
}
