//! Helpers of the tests of all crates: the seed of random data, the relative error, the files of
//! the repository, a server of models, and the commands of the book's pages.
//!
//! The crate depends on none of the others, so that the unit tests of each of them can use it.
//! Operands of matmuls and their f64 reference are in the package `marlin-tests`.

mod error;
mod files;
mod hub;
#[cfg(unix)]
mod page;
mod seed;

pub use error::{relative_error, relative_error_of_terms};
pub use files::{expect_page, repository_file};
pub use hub::{HubFaults, HubFile, HubRequest, HubServer};
#[cfg(unix)]
pub use page::{PageRun, run_page, run_project_page};
pub use seed::{rng, seed};
