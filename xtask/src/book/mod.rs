//! Checks the pages of the repository, and builds the book with mdBook, which is installed in
//! `target` if the pinned version is missing there.

mod benchmarks;
mod blocks;
mod constants;
mod figures;
mod links;
mod pages;
mod pictures;

use crate::process::{Error, cargo, root, run, target};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

const VERSION: &str = "0.5.4";
/// The variable with which tests write the pages that they check.
const UPDATE: &str = "BURN_MARLIN_UPDATE_BOOK";

/// Checks the pages, and builds the book into `target/book`. Tables of benchmarks, pictures of
/// records, code blocks that show a file, the page of the command line and the table of what fits
/// are written anew if `update` is true.
pub fn build(update: bool) -> Result<(), Error> {
    benchmarks::tables(update)?;
    if update {
        // In an ordinary build of the book the pages are not compared: for that the whole program
        // must be compiled. `cargo xtask test` compares them.
        for (target, test) in [
            ("--test=cli", "command_line::"),
            ("--lib", "advise::tests::the_page"),
        ] {
            let arguments = ["test", "--workspace", target, "--quiet", test];
            run(cargo(arguments).env(UPDATE, "1"))?;
        }
    }
    let pages = pages::all()?;
    let faults = [
        blocks::stale_files(&pages, update)?,
        blocks::wide_lines(&pages)?,
        links::faults(&pages),
        constants::faults()?,
        figures::faults(&pages),
        pictures::stale(update)?,
    ]
    .concat();
    if !faults.is_empty() {
        return Err(Error::Needs(faults.join("\n")));
    }
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
    // What cargo has installed there. An mdBook without the feature builds a book without search.
    let installed = fs::read_to_string(tools.join(".crates2.json")).unwrap_or_default();
    let is_pinned =
        installed.contains(&format!("\"mdbook {VERSION} ")) && installed.contains("\"search\"");
    if is_pinned && program.is_file() {
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
        "--features",
        "search",
        "--quiet",
        "--root",
    ]);
    // A debug build takes a third of the time, and is fast enough for the book.
    run(install.arg(&tools).arg("--debug"))?;
    Ok(program)
}
