//! The bodies of the fuzz targets, and valid inputs as seeds.
//!
//! `crates/marlin-format/tests/format/fuzz.rs`, `crates/marlin-text/tests/hostile` and
//! `crates/marlin-http/tests/http/fuzz.rs` include modules of this crate, and run them on mutated
//! inputs wherever the tests run.

mod errors;
mod formats;
mod http;
mod seeds;
mod targets;
mod text;

pub use http::{answer, answer_seeds, body, body_seeds, requests, tool_call, tool_call_seeds};
pub use seeds::{config_seeds, tensor_seeds};
pub use targets::{Folder, config};
pub use text::{TokenizerFolder, template, template_seeds, tokenizer_seeds};
