//! Helpers of the device tests: the list of problems and what they run on, random operands and
//! their seed, the f64 reference, the relative error, the repository's files.

mod data;
mod error;
mod files;
mod kernels;
mod problems;
mod seed;

pub use data::{Case, Operands, plain_bytes};
pub use error::{relative_error, tolerance};
pub use files::repository_file;
pub use kernels::runs_on_tensor_cores;
pub use problems::{ROWS, cases, shapes};
pub use seed::seed;

/// The book's Rust blocks, compiled and run as doc tests.
#[cfg(doctest)]
mod book {
    #[doc = include_str!("../../book/src/getting-started.md")]
    mod getting_started {}
    #[doc = include_str!("../../book/src/convert.md")]
    mod convert {}
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
    #[doc = include_str!("../../book/src/errors.md")]
    mod errors {}
    #[doc = include_str!("../../README.md")]
    mod readme {}
}
