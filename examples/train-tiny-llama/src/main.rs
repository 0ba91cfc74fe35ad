//! Trains the small Llama of this repository, on the Rust sources of the project's dependencies.

mod corpus;
mod error;
mod train;

use clap::Parser;

/// Trains a small Llama on the Rust sources of this project's dependencies.
#[derive(Debug, Parser)]
enum Command {
    /// Collect the training text, train the tokenizer, and write both as tokens
    Corpus(corpus::Options),
    /// Train the model on a folder that `corpus` wrote
    Train(train::Options),
}

fn main() -> std::process::ExitCode {
    let result = match Command::parse() {
        Command::Corpus(options) => corpus::run(&options),
        Command::Train(options) => train::run(&options),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
