//! The bodies of the fuzz targets, and valid inputs as seeds.
//!
//! `crates/marlin-format/tests/format/fuzz.rs` includes modules of this crate, and runs them on
//! mutated inputs wherever the tests run.

mod errors;
mod formats;
mod seeds;
mod targets;
mod text;

pub use seeds::{config_seeds, tensor_seeds};
pub use targets::{Folder, config};
pub use text::{TokenizerFolder, template, template_seeds, tokenizer_seeds};
