//! The CUDA text of the kernels and its digest, without a device, for tests, CI and records.
//!
//! Each routine has a function `source` that returns its text.

mod cuda;
mod digest;
mod plan;

pub use cuda::{
    KernelSource, buffer, cuda_text, optional, properties, settings, shared_limit, target,
};
pub use plan::{source_of, tile_source};
