//! `cargo xtask`: everything this repository does besides being compiled.

mod book;
mod demo;
mod gpu;
mod llvm;
mod process;
mod test;

use clap::{Parser, Subcommand};
use process::Error;
use std::path::PathBuf;
use std::process::ExitCode;

/// Set-up, demo, tests and book of burn-marlin.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make this machine able to build the workspace, so that a plain `cargo build` works.
    Setup,
    /// Run the main job on the shipped model: quantise, compare, generate.
    Demo,
    /// Run every check: format, clippy, docs, tests, doc tests, book.
    Test,
    /// Build the book into `target/book`.
    Book,
    /// Build the test binary for a machine without a Rust toolchain and pack it into a folder.
    PackGpu {
        /// Folder that receives the packed binaries and what they read.
        out: PathBuf,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Setup => llvm::set_up(),
        Command::Demo => demo::run_all(),
        Command::Test => test::run_all(),
        Command::Book => book::build(),
        Command::PackGpu { out } => gpu::pack(&out),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

fn report(error: &Error) {
    eprintln!("error: {error}");
}
