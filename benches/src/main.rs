//! The program `burn-marlin-bench`.

use std::process::ExitCode;

fn main() -> ExitCode {
    marlin_benches::main(std::env::args_os())
}
