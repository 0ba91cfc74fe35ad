//! The program `burn-marlin`, which inspects checkpoints of language models, quantises them to 4 or
//! 8 bits, runs and serves them.
//!
//! The library has the function [`main`], so that a binary that combines several programs can
//! include this one, and [`command`], from which its documentation is made.
//!
//! # Features
#![doc = document_features::document_features!()]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod advise;
mod args;
mod commands;
mod device;
mod error;
mod experts;
mod hub;
#[cfg(feature = "cubecl-runtime")]
mod kernel_cache;
mod output;
mod plot;
mod progress;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use error::CliError;
use std::ffi::OsString;
use std::io::{ErrorKind, IsTerminal};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// The log filter that applies if `RUST_LOG` is not set. wgpu reports every graphics API that a
/// machine lacks as an error; the devices present are listed when one is requested.
const LOG: &str = "warn,wgpu_hal=off";

/// The same for a server, which also tells where it listens.
#[cfg(feature = "serve")]
const SERVER_LOG: &str = "warn,wgpu_hal=off,marlin_http=info,marlin_serve=info";

/// Returns the definition of the command line: all commands and options, with their help.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the program with its arguments, the first of which is its name, and returns its exit
/// status. Call it before anything else in a binary's `main`: the process may be a worker of
/// [`marlin_lm::init`].
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    marlin_lm::init();
    let cli = Cli::parse_from(args);
    init_logs(&cli.command);
    progress::set_quiet(cli.quiet);
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has closed the pipe, as in `burn-marlin inspect model | head`.
        Err(CliError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", output::message(&error));
            ExitCode::FAILURE
        }
    }
}

/// Sends logs to standard error.
fn init_logs(command: &Command) {
    let (log, is_json) = log_of(command);
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(log));
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    // A log in a file has no colours; `NO_COLOR` switches them off on a terminal, too.
    let logs = if std::io::stderr().is_terminal() {
        logs
    } else {
        logs.with_ansi(false)
    };
    if is_json {
        logs.json().init();
    } else {
        logs.init();
    }
}

/// Returns the log filter of a command, and true if its logs are JSON.
#[cfg_attr(
    not(feature = "serve"),
    allow(unused_variables, reason = "only servers have their own")
)]
fn log_of(command: &Command) -> (&'static str, bool) {
    #[cfg(feature = "serve")]
    if let Command::Serve(args) = command {
        return (SERVER_LOG, args.json_logs);
    }
    (LOG, false)
}

fn run(cli: &Cli) -> Result<(), CliError> {
    burn_marlin::install()?;
    match &cli.command {
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Quantize(args) => commands::quantize::run(args),
        Command::Generate(args) => commands::generate::run(args),
        Command::Chat(args) => commands::chat::run(args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => commands::serve::run(args),
        #[cfg(feature = "serve")]
        Command::BenchServe(args) => commands::bench_serve::run(args),
        Command::Perplexity(args) => commands::perplexity::run(args),
        Command::Evaluate(args) => commands::evaluate::run(args),
        Command::Logits(args) => commands::logits::run(args),
        Command::Advise(args) => commands::advise::run(args),
        Command::Kernels(args) => commands::kernels::run(args),
        Command::Doctor(args) => commands::doctor::run(args),
    }
}
