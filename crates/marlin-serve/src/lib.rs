//! The engine of an LLM server: continuous batching over a paged KV cache, apart from the device
//! that computes and from the protocol of the clients.
//!
//! - [`server`]: the engine as a library, requests in and streams of text out. It owns a thread, on
//!   which it runs a scheduler and an executor.
//! - [`grammar`]: the tokens that a JSON schema, a regular expression or a Lark grammar allows.
//!
//! The parts below have no threads and no clock. [`Scheduler`] takes requests and decides what each
//! step of the model computes: an executor runs the steps, and the caller passes the time.
//!
//! - [`PagePool`]: the pages of the KV cache, each with the keys and values of
//!   [`page_size`](SchedulerConfig::page_size) positions.
//! - [`PrefixTree`]: the pages of computed prefixes, which later requests share.
//! - [`Scheduler`]: the waiting queue, the running sequences, and the steps.
//!
//! # How a step flows
//!
//! 1. [`submit`](Scheduler::submit) puts a request in the waiting queue, or refuses it if the queue
//!    is full or the pool could never hold it.
//! 2. [`schedule`](Scheduler::schedule) returns a [`Step`]. Every sequence that has its prompt
//!    computed gets a [`DecodeRow`]. What is left of the step's budget of tokens goes to
//!    [`PrefillChunk`]s, first of sequences whose prompt is partly computed, then of requests from
//!    the queue. A request that leaves the queue shares the pages of the longest prefix in the tree
//!    and gets pages for the rest of its prompt.
//! 3. The executor runs the step: it writes keys and values to the pages of the step, and samples a
//!    token for each decode row and for each chunk that ends a prompt.
//! 4. [`complete`](Scheduler::complete) takes the tokens and returns [`Event`]s. Full pages of
//!    prompts go to the tree, sequences that ended give their pages back.
//!
//! `schedule` may be called once more before `complete`, so that the host prepares step n+1 while
//! the device runs step n. The host does not know the tokens of step n then, but it knows the
//! positions: in a decode row without a token, the executor takes the token that the step before
//! sampled for the same request, on the device. If step n turns out to be the last of a sequence,
//! its row in step n+1 is ignored, and its pages are kept until step n+1 is complete.
//!
//! A decode row that needs a page takes a free one, or that of the least recently used prefix that
//! no sequence shares. If there is none, the newest sequence of the lowest priority is pre-empted:
//! its full pages go to the tree, where they can be evicted, and it is first in the queue, to be
//! computed anew with the tokens that it has.
//!
//! The prefix tree compares token IDs and nothing else: sequences whose keys and values depend on
//! more, such as an adapter or an image, must not share a scheduler with others.
//!
//! ```
//! use marlin_serve::{EventKind, Outcome, Request, Scheduler, SchedulerConfig};
//! use std::time::Duration;
//!
//! let mut scheduler = Scheduler::new(SchedulerConfig::new(1024))?;
//! let now = Duration::ZERO;
//! let request = scheduler.submit(Request::new(vec![1, 2, 3], 16), now)?;
//! let step = scheduler.schedule(now).expect("a request is waiting");
//! assert_eq!(step.prefill[0].tokens, [1, 2, 3]);
//! assert!(step.prefill[0].ends_prompt);
//! // The executor runs the step. Here it samples the token 4.
//! let events = scheduler.complete(step, vec![Outcome::Token(4)], now);
//! assert_eq!(events[0].request, request);
//! assert_eq!(events[0].kind, EventKind::FirstToken(4));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod grammar;
pub mod model;
mod pages;
mod prefix;
mod scheduler;
pub mod server;

pub use pages::{PageId, PagePool};
pub use prefix::PrefixTree;
pub use scheduler::{
    ConfigError, DecodeRow, Event, EventKind, FailReason, FinishReason, Metrics, Outcome,
    PageTable, PrefillChunk, Request, RequestId, Scheduler, SchedulerConfig, Step, SubmitError,
};
