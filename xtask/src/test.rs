//! Every check of the project, in the order in which a failure is cheapest to learn of.

use crate::process::{Error, cargo, run, step};
use crate::{book, llvm, nvidia};

/// Runs all of them; stops at the first that fails.
pub fn run_all() -> Result<(), Error> {
    let compiler = step("set-up", || {
        llvm::set_up()?;
        nvidia::set_up()
    })?;
    step("format", || run(&mut cargo(["fmt", "--all", "--check"])))?;
    step("clippy", || run(&mut cargo(["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"])))?;
    // The workspace has every runtime among its features; who depends on a crate with `flex` alone has none.
    let without_runtime =
        ["clippy", "--package", "marlin-llama", "--no-default-features", "--features", "flex", "--", "--deny", "warnings"];
    step("without a CubeCL runtime", || run(&mut cargo(without_runtime)))?;
    step("docs", || run(cargo(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "--deny warnings")))?;
    let mut tests = cargo(["test", "--workspace", "--all-targets"]);
    // Where there is none, the tests that need it say that they were left out.
    tests.envs(compiler.map(|folder| (nvidia::VARIABLE, folder)));
    step("tests", || run(&mut tests))?;
    step("doc tests", || run(&mut cargo(["test", "--workspace", "--doc"])))?;
    step("book", book::build)
}
