//! Tests of templates and tokenizers that would hang, fill the memory or crash the program: each
//! call is an error, and the next call works.

mod latency;
mod mutated;
mod support;
mod templates;
mod tokenizers;

use std::process::ExitCode;

use libtest_mimic::Arguments;

fn main() -> ExitCode {
    marlin_text::init();
    let mut tests = templates::tests();
    tests.extend(tokenizers::tests());
    tests.extend(mutated::tests());
    tests.extend(latency::tests());
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}
