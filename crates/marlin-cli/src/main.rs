//! The program `burn-marlin`: look into Llama checkpoints, quantise them to 4 bits, run them.

mod args;
mod commands;
mod device;
mod error;
mod output;

use args::{Cli, Command};
use clap::Parser;
use error::CliError;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt().with_env_filter(EnvFilter::from_default_env()).with_writer(std::io::stderr).init();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<(), CliError> {
    burn_marlin::install()?;
    match &cli.command {
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Quantize(args) => commands::quantize::run(args),
        Command::Generate(args) => commands::generate::run(args),
        Command::Chat(args) => commands::chat::run(args),
        Command::Perplexity(args) => commands::perplexity::run(args),
        Command::Logits(args) => commands::logits::run(args),
        Command::Kernels(args) => commands::kernels::run(args),
    }
}
