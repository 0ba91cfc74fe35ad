//! Helpers of the tests of all crates: the seed of random data, the relative error, the files of
//! the repository, and a server of models.
//!
//! The crate depends on none of the others, so that the unit tests of each of them can use it.
//! Operands of matmuls and their f64 reference are in the package `marlin-tests`.

mod error;
mod files;
mod hub;
mod seed;

pub use error::{relative_error, relative_error_of_terms};
pub use files::repository_file;
pub use hub::{HubFaults, HubFile, HubRequest, HubServer};
pub use seed::{rng, seed};
