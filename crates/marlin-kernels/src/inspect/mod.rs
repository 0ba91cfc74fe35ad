//! A look at the kernels without a device: their CUDA text and its digest. For tests, CI and
//! records.
//!
//! Each routine has a function `source` that returns its text.

mod cuda;
mod digest;
mod plan;

pub use cuda::{Source, buffer, cuda_text, optional, properties, settings, shared_limit, target};
pub use plan::{source_of, tile_source};
