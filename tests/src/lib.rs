//! Helpers of the device tests: the list of problems and the devices they run on, random operands
//! with their f64 reference, and the tolerance of each dtype.

mod data;
mod error;
mod kernels;
mod problems;

pub use data::{Case, Operands, gated, plain_bytes, round};
pub use error::tolerance;
pub use kernels::runs_on_tensor_cores;
pub use problems::{ROWS, cases, shapes};

/// The Rust blocks of the book and of the README files, compiled and run as doc tests.
#[cfg(doctest)]
mod book {
    #[doc = include_str!("../../book/src/getting-started.md")]
    mod getting_started {}
    #[doc = include_str!("../../book/src/convert.md")]
    mod convert {}
    #[doc = include_str!("../../book/src/load-module.md")]
    mod load_module {}
    #[doc = include_str!("../../book/src/quantise.md")]
    mod quantise {}
    #[doc = include_str!("../../book/src/sparse.md")]
    mod sparse {}
    #[doc = include_str!("../../book/src/checkpoints.md")]
    mod checkpoints {}
    #[doc = include_str!("../../book/src/llama.md")]
    mod llama {}
    #[doc = include_str!("../../book/src/decode.md")]
    mod decode {}
    #[doc = include_str!("../../book/src/design.md")]
    mod design {}
    #[doc = include_str!("../../book/src/mixtures.md")]
    mod mixtures {}
    #[doc = include_str!("../../book/src/tensor-parallelism.md")]
    mod tensor_parallelism {}
    #[doc = include_str!("../../book/src/errors.md")]
    mod errors {}
    #[doc = include_str!("../../README.md")]
    mod readme {}
    #[doc = include_str!("../../crates/burn-marlin/README.md")]
    mod readme_of_burn_marlin {}
    #[doc = include_str!("../../crates/marlin-lm/README.md")]
    mod readme_of_marlin_lm {}
}
