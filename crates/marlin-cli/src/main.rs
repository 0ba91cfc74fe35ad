//! The program `burn-marlin`.

use std::process::ExitCode;

fn main() -> ExitCode {
    marlin_cli::main(std::env::args_os())
}
