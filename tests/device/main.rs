//! Tests that run on a device: `cargo test -p marlin-tests --test device -- --device cuda`.
//!
//! Without `--device`, the tests run on Flex and on CubeCL's CPU runtime, which every machine has.
//! The seed of the random data is printed; the environment variable `MARLIN_TEST_SEED` sets it.
//!
//! The binary also runs the benches or the program, if its first argument is `burn-marlin-bench` or
//! `burn-marlin`. `cargo xtask pack-gpu` packs the binary for a machine without a Rust toolchain.
//! One binary contains Burn only once, which is 20 MB packed.

mod convert;
mod convert_checkpoints;
mod convert_loading;
mod convert_models;
mod decode_attention;
mod decode_matmul;
mod decode_rows;
mod decode_sample;
mod engine;
mod experts;
mod fp8;
mod gemv;
mod golden;
mod gptq;
mod host;
mod kernels;
mod layer;
mod llama;
mod lora;
mod marlin;
mod mixtures;
mod models;
mod pdl;
mod plans;
mod repack;
mod setup;

use libtest_mimic::Arguments;
use setup::Options;
use std::process::ExitCode;

fn main() -> ExitCode {
    // The process may be a worker, which has none of the first arguments below.
    marlin_lm::init();
    let mut args = std::env::args_os().skip(1).peekable();
    match args.peek().and_then(|first| first.to_str()) {
        Some("burn-marlin") => marlin_cli::main(args),
        Some("burn-marlin-bench") => marlin_benches::main(args),
        _ => run_tests(),
    }
}

fn run_tests() -> ExitCode {
    let (options, rest) = match Options::parse(std::env::args()) {
        Ok(parsed) => parsed,
        Err(message) => {
            eprintln!("error: {message}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = burn_marlin::install() {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    println!("devices: {}", options.names());
    let mut tests = Vec::new();
    for device in &options.devices {
        kernels::add(&mut tests, device, options.seed);
        repack::add(&mut tests, device, options.seed);
        gemv::add(&mut tests, device, options.seed);
        marlin::add(&mut tests, device, options.seed);
        fp8::add(&mut tests, device, options.seed);
        experts::add(&mut tests, device, options.seed);
        decode_sample::add(&mut tests, device, options.seed);
        decode_attention::add(&mut tests, device, options.seed);
        layer::add(&mut tests, device, options.seed);
        convert::add(&mut tests, device);
        convert_models::add(&mut tests, device);
        convert_loading::add(&mut tests, device);
        convert_checkpoints::add(&mut tests, device);
        lora::add(&mut tests, device);
        decode_rows::add(&mut tests, device, options.seed);
        decode_matmul::add(&mut tests, device, options.seed);
        golden::add(&mut tests, device);
        gptq::add(&mut tests, device, options.seed);
        host::add(&mut tests, device);
        engine::add(&mut tests, device);
        mixtures::add(&mut tests, device);
        pdl::add(&mut tests, device);
        llama::add(&mut tests, device);
        plans::add(&mut tests, device);
    }
    let mut arguments = Arguments::from_iter(rest);
    // Tests share the device, and count the operations that fusion replaced on it.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, options.partition.of(tests)).exit_code()
}
