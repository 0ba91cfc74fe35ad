//! Builds the book with mdBook, which is installed in `target` if the pinned version is missing
//! there.

use crate::benchmarks;
use crate::process::{Error, cargo, root, run, target};
use std::path::PathBuf;
use std::process::Command;

const VERSION: &str = "0.5.4";

/// Builds the book into `target/book`. The tables of benchmarks are checked against the records, or
/// written anew if `update` is true.
pub fn build(update: bool) -> Result<(), Error> {
    benchmarks::tables(update)?;
    let mut command = Command::new(mdbook()?);
    run(command
        .arg("build")
        .arg(root().join("book"))
        .arg("--dest-dir")
        .arg(target().join("book")))
}

/// Returns the path of the pinned mdBook, after installing it if needed.
fn mdbook() -> Result<PathBuf, Error> {
    let tools = target().join("tools");
    let program = tools.join("bin/mdbook");
    let version = Command::new(&program).arg("--version").output();
    if version.is_ok_and(|output| {
        String::from_utf8_lossy(&output.stdout).trim() == format!("mdbook v{VERSION}")
    }) {
        return Ok(program);
    }
    println!(
        "xtask: installing mdbook {VERSION} into {}",
        tools.display()
    );
    let mut install = cargo([
        "install",
        "mdbook",
        "--version",
        VERSION,
        "--locked",
        "--no-default-features",
        "--quiet",
        "--root",
    ]);
    // A debug build takes a third of the time, and is fast enough for the book.
    run(install.arg(&tools).arg("--debug"))?;
    Ok(program)
}
