//! Checks of the processor and its memory.

use super::report::{Check, Section};
use crate::output::size;
use marlin_format::available_memory;
use std::thread::available_parallelism;

/// Returns the processor, what its kernels use of it, and the free memory.
pub fn check() -> Section {
    let cores = match available_parallelism() {
        Ok(cores) => Check::ok("cores", cores.to_string()),
        Err(error) => Check::ok("cores", format!("not known: {error}")),
    };
    let memory = available_memory().map_or_else(|| "not known".into(), size);
    Section {
        name: "cpu",
        checks: vec![
            Check::ok("processor", processor()),
            instructions(),
            cores,
            Check::ok("free memory", memory),
        ],
    }
}

/// Returns the name of the processor.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(field, _)| field.trim() == "model name");
    name.map_or_else(
        || std::env::consts::ARCH.into(),
        |(_, name)| name.trim().into(),
    )
}

/// Returns the vector instructions that the kernels of the host use.
#[cfg(target_arch = "x86_64")]
fn instructions() -> Check {
    let features = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
    ];
    let names: Vec<_> = features
        .iter()
        .filter_map(|(name, present)| present.then_some(*name))
        .collect();
    // The host kernels use AVX2 together with the other two, or AVX-512 alone.
    if features[..3].iter().all(|(_, present)| *present) || features[3].1 {
        Check::ok("instructions", names.join(", "))
    } else {
        Check::warning(
            "instructions",
            "neither avx512f nor all of avx2, fma and f16c: flex runs without vectors, slowly",
            "run on a processor of 2013 or later, or let the virtual machine pass its features",
        )
    }
}

/// Returns the vector instructions that the kernels of the host use.
#[cfg(not(target_arch = "x86_64"))]
fn instructions() -> Check {
    let vectors = if cfg!(target_arch = "aarch64") {
        "neon"
    } else {
        "no vectors"
    };
    Check::ok("instructions", vectors)
}
