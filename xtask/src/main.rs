//! `cargo xtask`: set-up, demo, tests, benches and book of this repository.

mod bench;
mod book;
mod demo;
mod gpu;
mod llvm;
mod nvidia;
mod package;
mod process;
mod python;
mod runner;
mod serve;
mod test;
mod user;

use clap::{Parser, Subcommand};
use nvidia::Proof;
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
    /// Set this machine up so that `cargo build` builds the workspace.
    Setup,
    /// Run the demo on the shipped model: quantise, compare, generate.
    Demo,
    /// Run the fast checks: format, clippy, the tests of the libraries, and the device tests on
    /// Flex.
    Check,
    /// Run every check except the slow ones: format, clippy, docs, tests, machine code that is not
    /// in the ledger, doc tests, Python's clients of the server, book.
    Test,
    /// Run the slower checks of the server: 10,000 requests to the shipped model, 1,000,000
    /// simulated ones, 100,000 mutated bodies and texts, the page in Chromium, Python's clients,
    /// and two servers behind SGLang's router.
    TestServe,
    /// Run the slow checks: clippy without a CubeCL runtime, device tests that take CubeCL's CPU
    /// runtime minutes, a program of a user, and the machine code of every configuration.
    Slow,
    /// Build a program of a user without optimisation, check that none of the arithmetic is
    /// compiled in it, and time a converted layer.
    UserProgram {
        /// Level of optimisation of what the program depends on; 0 is that of a manifest without
        /// profiles.
        #[arg(long, default_value_t = user::OPT_LEVEL, value_parser = clap::value_parser!(u8).range(..=3))]
        opt_level: u8,
    },
    /// Compile the kernels for every card, without a GPU, and check the machine code against the
    /// rules and the ledger, `tests/sass/ledger`.
    Proof {
        /// Compile only kernels that are not in the ledger, and write the results into it.
        #[arg(long, conflicts_with = "all")]
        bless: bool,
        /// Compile the configurations that the ledger leaves out, too.
        #[arg(long)]
        all: bool,
    },
    /// Build the book into `target/book`, and check the pages of the repository: the figures of
    /// README and benchmarks and the pictures against the records, figures that repeat a constant
    /// against the code, the files shown in code blocks, the width of code, links.
    Book {
        /// Write anew what is made of other files: tables of benchmarks, pictures of records, code
        /// blocks that show a file, and the page of the command line, for which the program is
        /// built.
        #[arg(long)]
        update: bool,
    },
    /// Make the packages of the published crates and check them: that each builds by itself with
    /// the oldest supported Rust, its size, its documentation as docs.rs builds it, and its API
    /// against the last tag.
    Package {
        /// Only make the packages, and check their manifests and sizes.
        #[arg(long)]
        no_verify: bool,
    },
    /// Time the kernels on this machine's NVIDIA card, or with `cargo xtask bench host` on its
    /// cores; `--help` after either command lists the options.
    Bench {
        /// Arguments of the bench program.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        args: Vec<String>,
    },
    /// Build device tests, benches and program for a machine with a GPU and no Rust toolchain, as a
    /// folder and as an archive of it; `run.sh` in the folder runs the tests.
    PackGpu {
        /// The output folder; the archive is beside it, with `.tar.xz` after its name.
        out: PathBuf,
    },
    /// Record a complete run of the device tests on a card as the last run of its kind of device.
    RecordGpu {
        /// A file with the output of `run.sh`.
        output: PathBuf,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Setup => llvm::set_up(),
        Command::Demo => demo::run_all(),
        Command::Check => test::run_quick(),
        Command::Test => test::run_all(),
        Command::TestServe => serve::run_slow(),
        Command::Slow => test::run_slow(),
        Command::UserProgram { opt_level } => user::check(opt_level),
        Command::Proof { bless, all } => nvidia::prove(match (bless, all) {
            (true, _) => Proof::Bless,
            (_, true) => Proof::All,
            _ => Proof::Everything,
        }),
        Command::Bench { args } => bench::run_bench(&args),
        Command::Package { no_verify } => package::run_all(!no_verify),
        Command::Book { update } => book::build(update),
        Command::PackGpu { out } => gpu::pack(&out),
        Command::RecordGpu { output } => gpu::record(&output),
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

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::Parser;

    #[test]
    fn workflows_run_commands_that_exist() {
        let folder = crate::process::root().join(".github/workflows");
        let mut names = Vec::new();
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            for (_, rest) in text
                .lines()
                .filter_map(|line| line.split_once("run: cargo xtask "))
            {
                match rest.strip_prefix("${{ matrix.task }}") {
                    // The list of the matrix.
                    Some(_) => {
                        let (_, list) = text.split_once("task: [").unwrap();
                        let (list, _) = list.split_once(']').unwrap();
                        names.extend(list.split(", ").map(String::from));
                    }
                    None => names.push(rest.to_owned()),
                }
            }
        }
        for name in &names {
            let words = ["xtask"].into_iter().chain(name.split(' '));
            Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        for name in [
            "setup",
            "check",
            "test",
            "test-serve",
            "slow",
            "package",
            "book",
        ] {
            assert!(names.iter().any(|found| found == name), "{name}: {names:?}");
        }
    }
}
