//! Runs the benches in a release build.

use crate::llvm;
use crate::process::{Error, cargo, run};

/// Builds the benches and runs them with `args`.
pub fn run_bench(args: &[String]) -> Result<(), Error> {
    let mut command = cargo(["run", "--release", "--package", "marlin-benches"]);
    if args.first().is_some_and(|bench| bench == "host") {
        // This bench needs no card, and builds much faster without CUDA.
        command.arg("--no-default-features");
    } else {
        llvm::set_up()?;
    }
    run(command.arg("--").args(args))
}
