//! Helpers of the tests of all crates: the seed of random data, random operands, references in f64,
//! the relative error, figures with measured ranges, the files of the repository, golden folders, a server of models, and the
//! commands of the book's pages.
//!
//! The crate depends on none of the others, so that the unit tests of each of them can use it.
//! Quantised operands of matmuls and their f64 reference are in the package `marlin-tests`.

mod error;
mod files;
mod golden;
mod hub;
mod json;
mod operands;
#[cfg(unix)]
mod page;
mod reference;
mod seed;
mod text;

pub use error::{expect_measured, relative_error, relative_error_of_terms};
pub use files::{expect_page, repository_file};
pub use golden::{GoldenFolder, GoldenTensors, golden, golden_json};
pub use hub::{HubFaults, HubFile, HubRequest, HubServer};
pub use json::with_fields;
pub use operands::{layer_inputs, random_values};
#[cfg(unix)]
pub use page::{PageRun, run_page, run_project_page};
pub use reference::{rms_norm, rotate};
pub use seed::{rng, seed};
pub use text::{
    byte_fallback_tokenizer, byte_level_file, byte_level_tokenizer, open_tokenizer, random_pieces,
};
