//! The checks of the project, in the order in which a failure is cheapest to find.

use crate::nvidia::Proof;
use crate::process::{Error, cargo, output, run, step};
use crate::{book, gpu, llvm, nvidia, runner, serve, user};
use std::panic::resume_unwind;
use std::process::Command;
use std::thread;

/// Runs every check except those of [`run_slow`] and [`serve::run_slow`]; stops at the first
/// failure.
pub fn run_all() -> Result<(), Error> {
    step("set-up", llvm::set_up)?;
    let compiler = thread::scope(|scope| {
        // A download, which the tests are the first to need.
        let compiler = scope.spawn(nvidia::set_up);
        format_and_clippy()?;
        step("docs", || {
            run(cargo(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "--deny warnings"))
        })?;
        compiler.join().unwrap_or_else(|panic| resume_unwind(panic))
    })?;
    // Without the compiler's folder, the tests of the machine code are skipped with a message.
    step("tests", || {
        runner::run_tests(compiler.as_deref().map(|folder| (nvidia::VARIABLE, folder)))
    })?;
    step("doc tests", || {
        run(&mut cargo(["test", "--workspace", "--doc"]))
    })?;
    let skipped = step("clients", serve::run_clients)?;
    step("book", || book::build(false))?;
    gpu::print_last_runs();
    if let Some(skipped) = skipped {
        println!("{skipped}");
    }
    Ok(())
}

/// Runs the checks that take long and seldom fail if the other checks pass.
pub fn run_slow() -> Result<(), Error> {
    step("set-up", llvm::set_up)?;
    // The workspace enables the features of every runtime; a program that depends on a crate with
    // only `flex` has no CubeCL runtime.
    let without_runtime = [
        "clippy",
        "--package",
        "marlin-cli",
        "--no-default-features",
        "--features",
        "flex",
        "--",
        "--deny",
        "warnings",
    ];
    step("without a CubeCL runtime", || {
        run(&mut cargo(without_runtime))
    })?;
    step("slow tests on CubeCL's CPU runtime", || {
        let mut slow = device_tests("cpu");
        run(slow.arg("--ignored"))
    })?;
    step("a user's program", || user::check(user::OPT_LEVEL))?;
    nvidia::prove(Proof::All)
}

/// Runs the checks for every save: format, clippy, the tests of the libraries, and the tests of
/// layers and models on Flex.
pub fn run_quick() -> Result<(), Error> {
    step("set-up", llvm::set_up)?;
    format_and_clippy()?;
    step("tests of the libraries", || {
        run(&mut cargo([
            "test",
            "--workspace",
            "--lib",
            "--test",
            "format",
            "--quiet",
        ]))
    })?;
    step("tests on Flex", || run(&mut device_tests("flex")))
}

/// Returns the command of the device tests on one device; what is added are options of the tests.
fn device_tests(device: &str) -> Command {
    cargo([
        "test",
        "--workspace",
        "--test",
        "device",
        "--quiet",
        "--",
        "--device",
        device,
    ])
}

fn format_and_clippy() -> Result<(), Error> {
    step("format", || run(&mut cargo(["fmt", "--all", "--check"])))?;
    step("dependencies of Flex", no_cubecl_with_flex)?;
    step("clippy", || {
        run(&mut cargo([
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "--deny",
            "warnings",
        ]))
    })
}

/// Checks that a program with Flex alone does not depend on CubeCL's compiler, which takes most of
/// the time of a build.
fn no_cubecl_with_flex() -> Result<(), Error> {
    let mut tree = cargo("tree --package marlin-cli --no-default-features --features flex --prefix none --edges normal,build".split(' '));
    let tree = output(&mut tree)?;
    match tree.lines().find(|line| line.starts_with("cubecl-core ")) {
        None => Ok(()),
        Some(found) => Err(Error::Needs(format!(
            "marlin-cli with the feature flex alone depends on {found}; `cargo tree --package marlin-cli --no-default-features --features flex --invert cubecl-core` shows why, and the dependency belongs to the feature cubecl-runtime"
        ))),
    }
}
