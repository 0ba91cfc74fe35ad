//! Benches, from a release build.

use crate::llvm;
use crate::process::{Error, cargo, run, target};
use std::path::PathBuf;

/// Builds the benches and runs them with `args`.
pub fn run_bench(args: &[String]) -> Result<(), Error> {
    llvm::set_up()?;
    run(cargo(["run", "--release", "--package", "marlin-benches", "--"]).args(args))
}

/// Builds the benches; the path of the binary.
pub fn build() -> Result<PathBuf, Error> {
    run(&mut cargo(["build", "--release", "--package", "marlin-benches"]))?;
    Ok(target().join("release/burn-marlin-bench"))
}
