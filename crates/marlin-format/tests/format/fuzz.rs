//! Runs the fuzz targets of `/fuzz` on mutated valid inputs: 20000 inputs for each target, or
//! `MARLIN_FUZZ_INPUTS`. The seed is printed.

#[path = "../../../../fuzz/src/errors.rs"]
mod errors;
#[path = "../../../../fuzz/src/formats.rs"]
mod formats;
#[path = "../../../../fuzz/src/mutate.rs"]
mod mutate;
#[path = "../../../../fuzz/src/seeds.rs"]
mod seeds;
#[path = "../../../../fuzz/src/targets.rs"]
mod targets;

use rand::rngs::StdRng;
use rand::{Rng, RngExt};

use self::mutate::{JSON, inputs, mutated};
use self::targets::Folder;
use crate::common::rng;

/// The tokens inserted into texts: words and symbols of configs, patterns and headers, and numbers
/// that are edge cases.
const TOKENS: [&str; 37] = [
    "2",
    "4",
    "8",
    "16",
    "32",
    "64",
    "128",
    "2147483648",
    "4294967296",
    "18446744073709551615",
    "re:.*",
    "-:",
    "+:",
    "(?=",
    "(a+)+",
    "{1000}",
    "\\\\d*",
    "|",
    "Linear",
    "gptq",
    "awq",
    "compressed-tensors",
    "auto-round",
    "marlin-24",
    "auto_round:auto_awq",
    "dynamic",
    "extra_config",
    "float",
    "fp8",
    "NVFP4",
    "I32",
    "F16",
    "F8_E4M3",
    "F8_E8M0",
    "U8",
    "l.g_idx",
    "shape",
];
/// The number of bytes of a safetensors file before its header.
const LENGTH_BYTES: usize = 8;

/// Returns [`TOKENS`] and the symbols of JSON.
fn tokens() -> Vec<&'static str> {
    [&JSON[..], &TOKENS].concat()
}

/// Runs a target with random seeds, and prints the process's peak memory before and after.
fn run(name: &str, seeds: &[Vec<u8>], mut target: impl FnMut(&mut StdRng, &[u8])) {
    let (mut rng, inputs) = (rng(), inputs(20_000));
    let mut run = |inputs| {
        for _ in 0..inputs {
            let seed = rng.random_range(0..seeds.len());
            target(&mut rng, &seeds[seed]);
        }
    };
    // Excludes one-time initialisation from the growth of memory.
    run(inputs.min(1000));
    let before = peak_memory();
    run(inputs);
    println!(
        "{name}: {inputs} inputs; peak memory {before} before, {} after",
        peak_memory()
    );
}

/// Returns `VmHWM` of `/proc/self/status`, or an empty text if there is none.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .map_or("unknown".into(), |size| size.trim().to_string())
}

/// Returns a safetensors file with changes in its header, and sometimes in its length or data.
fn mutated_file(rng: &mut StdRng, file: &[u8]) -> Vec<u8> {
    let (length, rest) = file.split_at(LENGTH_BYTES);
    let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header = if rng.random_bool(0.8) {
        mutated(rng, header, &tokens())
    } else {
        header.to_vec()
    };
    let mut data = data.to_vec();
    if rng.random_bool(0.3) && !data.is_empty() {
        let start = rng.random_range(0..data.len());
        let end = (start + rng.random_range(1..=8)).min(data.len());
        rng.fill_bytes(&mut data[start..end]);
    }
    if rng.random_bool(0.05) {
        data.truncate(rng.random_range(0..=data.len()));
    }
    let length = if rng.random_bool(0.95) {
        header.len() as u64
    } else {
        rng.random()
    };
    [&length.to_le_bytes(), header.as_slice(), &data].concat()
}

#[test]
fn seeds_are_accepted() {
    use marlin_format::checkpoint::Quantization;
    for seed in seeds::config_seeds() {
        let text = String::from_utf8_lossy(&seed).into_owned();
        match text.contains("config\":{") {
            true => assert!(
                Quantization::from_config(&seed).unwrap().is_some(),
                "{text}"
            ),
            false => drop(Quantization::from_quantize_config(&seed).unwrap()),
        }
    }
    let folder = Folder::new();
    let seeds = seeds::tensor_seeds();
    for seed in &seeds {
        assert!(folder.tensors(seed), "selector {}", seed[0]);
    }
    // GPTQ in two versions and pack-quantized, each in 16 specs; AWQ in eight; Marlin in two; 2:4
    // with two sets of names, in four each; FP8 by four configs, in two each; three formats of FP4.
    assert_eq!(seeds.len(), 3 * 16 + 8 + 2 + 2 * 4 + 4 * 2 + 3);
}

#[test]
fn configs() {
    run("config", &seeds::config_seeds(), |rng, seed| {
        targets::config(&mutated(rng, seed, &tokens()))
    });
}

#[test]
fn headers() {
    let folder = Folder::new();
    run("header", &seeds::tensor_seeds(), |rng, seed| {
        folder.header(&mutated_file(rng, &seed[1..]))
    });
}

#[test]
fn tensor_sets() {
    let folder = Folder::new();
    let (mut inputs, mut read) = (0, 0);
    run("tensors", &seeds::tensor_seeds(), |rng, seed| {
        // Mostly the format in which the seed was written.
        let selector = if rng.random_bool(0.9) {
            seed[0]
        } else {
            rng.random()
        };
        let file = mutated_file(rng, &seed[1..]);
        read += usize::from(folder.tensors(&[&[selector], file.as_slice()].concat()));
        inputs += 1;
    });
    // Some mutated layers are still readable, but not most of them.
    assert!(
        (inputs / 100..inputs / 2).contains(&read),
        "{read} of {inputs} were read"
    );
}
