//! Compiles every configuration of the Marlin kernel for every card, without a GPU, and checks the machine code. For compute capability 8.9, whose PTX is that for
//! 8.6, one configuration of a tile is compiled.
//!
//! CubeCL's CUDA text is compiled by NVRTC with CubeCL's options, then by ptxas, and listed by nvdisasm; `rules.rs` has the rules for the listing. A text
//! that has passed is not compiled again (`cache.rs`). `cargo xtask proof` installs the compiler and runs only these tests; `cargo xtask test` runs all
//! tests.

mod batch;
mod cache;
mod decode;
mod ladder;
mod listing;
mod nvrtc;
mod records;
mod report;
mod rules;
mod samples;
mod toolchain;

use batch::Batch;
use cache::Cache;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use marlin_format::{Bits, GroupSize, Sparsity};
use marlin_kernels::inspect::{Source, shared_limit};
use marlin_kernels::matmul::{mma_sync, wgmma};
use marlin_kernels::tile::{Config, Tile, configs};
use report::{Proof, Report};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use toolchain::{Toolchain, ToolchainError};

/// The environment variable with the folder of NVIDIA's compiler, which `cargo xtask` sets.
const FOLDER: &str = "BURN_MARLIN_NVIDIA";

/// A card that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Card {
    /// The architecture, as CubeCL names it to NVRTC.
    arch: &'static str,
    /// Compute capability, 80 for 8.0.
    capability: u32,
    /// A card with the same PTX, of which every configuration is checked: of this one the first configuration of each tile is, and that the PTX is the same.
    twin: Option<&'static Card>,
}

const SM_86: Card = Card { arch: "sm_86", capability: 86, twin: None };
const CARDS: [Card; 4] = [
    Card { arch: "sm_80", capability: 80, twin: None },
    SM_86,
    // ptxas used as many registers and instructions as for sm_86 in 376 of 376 configurations.
    Card { arch: "sm_89", capability: 89, twin: Some(&SM_86) },
    Card { arch: "sm_90a", capability: 90, twin: None },
];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let toolchain = match std::env::var_os(FOLDER).map(|folder| Toolchain::load(PathBuf::from(folder))).transpose() {
        Ok(toolchain) => toolchain.map(Arc::new),
        Err(error) => {
            eprintln!("error: {FOLDER}: {error}; `cargo xtask proof` sets the compiler up and the variable with it");
            return ExitCode::FAILURE;
        }
    };
    let report = Arc::new(Report::default());
    let mut tests = samples::trials();
    tests.push(records::trial());
    tests.extend(decode::trials(toolchain.as_ref()));
    tests.extend(ladder::trials(toolchain.as_ref()));
    for card in CARDS {
        let all = configs(card.capability, shared_limit(card.capability));
        let mut tiles: Vec<Tile> = Vec::new();
        for config in &all {
            if tiles.last() != Some(&config.tile) && !tiles.contains(&config.tile) {
                tiles.push(config.tile);
            }
        }
        for tile in tiles {
            let of_tile = all.iter().filter(|config| config.tile == tile).copied();
            let configs = of_tile.take(if card.twin.is_some() { 1 } else { usize::MAX }).collect();
            tests.push(tile_trial(card, tile, configs, toolchain.clone(), report.clone()));
        }
        if let Some(twin) = card.twin {
            let others = configs(twin.capability, shared_limit(twin.capability));
            let are_same = others == all;
            tests.push(Trial::test(format!("{}::configurations_are_those_of_{}", card.arch, twin.arch), move || {
                if are_same { Ok(()) } else { Err(Failed::from("each configuration of this card has to be compiled for it")) }
            }));
        }
        tests.push(Trial::test(format!("{}::every_format_has_a_configuration", card.arch), move || every_format(card, &all)));
    }
    let conclusion = libtest_mimic::run(&arguments, tests);
    report.print(&CARDS);
    conclusion.exit_code()
}

/// Returns a test of all configurations of one tile on one card, which fails with every rule that any of them breaks.
fn tile_trial(card: Card, tile: Tile, configs: Vec<Config>, toolchain: Option<Arc<Toolchain>>, report: Arc<Report>) -> Trial {
    let cluster = if tile.is_clustered() { format!("_cluster{}", tile.cluster) } else { String::new() };
    let sizes = format!("{}x{}x{}_stages{}", tile.rows(), tile.columns(), tile.depth(), tile.stages);
    let name = format!("{}::{sizes}_{}{cluster}", card.arch, tile.product);
    Trial::ignorable_test(name, move || {
        let Some(toolchain) = toolchain else {
            return Ok(Completion::ignored_with("needs NVIDIA's compiler: `cargo xtask proof` or `cargo xtask test` sets it up"));
        };
        let broken = prove(card, configs, &toolchain, &report)?;
        if broken.is_empty() { Ok(Completion::Completed) } else { Err(Failed::from(broken.join("\n"))) }
    })
}

/// Checks the machine code of the configurations of a tile; returns the rules that are broken.
fn prove(card: Card, configs: Vec<Config>, toolchain: &Toolchain, report: &Report) -> Result<Vec<String>, Box<dyn Error>> {
    let cache = Cache::new(toolchain);
    let (of_sources, count) = (cache.entry_of_sources(&format!("{configs:?}"), card.arch), configs.len());
    if Cache::has(&of_sources) {
        report.add_cached(count);
        return Ok(Vec::new());
    }
    let clock = Instant::now();
    let sources = configs.into_iter().map(|config| Ok((config, source(&config, card)?))).collect::<Result<_, Box<dyn Error>>>()?;
    let text_time = clock.elapsed();
    let Batch { kernels, times } = batch::compile(sources, card, toolchain)?;
    report.add_times([text_time, times.nvrtc, times.ptxas, times.nvdisasm]);
    report.add_cached(count - kernels.len());
    let mut all_broken = Vec::new();
    for kernel in kernels {
        let name = report::name(card, &kernel.of);
        let mut broken = rules::broken(card.capability, &kernel.of, &kernel.source, &kernel.usage, &kernel.code);
        if let Some(twin) = card.twin
            && !has_ptx_of(&kernel.source, card, twin, toolchain)?
        {
            broken.push(format!("the PTX is not that for {}, for which alone every configuration is checked", twin.arch));
        }
        if broken.is_empty() {
            kernel.passed();
        }
        all_broken.extend(broken.iter().map(|rule| format!("{name}: {rule}")));
        report.add(Proof::new(card, kernel, broken));
    }
    if all_broken.is_empty() {
        Cache::add(&of_sources);
    }
    Ok(all_broken)
}

/// Returns true if NVRTC's PTX is that for another card, but for the target.
fn has_ptx_of(source: &Source, card: Card, twin: &Card, toolchain: &Toolchain) -> Result<bool, ToolchainError> {
    let [own, other] = [card.arch, twin.arch].map(|arch| toolchain.ptx(&source.text, arch));
    Ok(own?.replacen(&format!(".target {}", card.arch), &format!(".target {}", twin.arch), 1) == other?)
}

/// Returns the CUDA text of a configuration.
fn source(config: &Config, card: Card) -> Result<Source, Box<dyn Error>> {
    Ok(match config.tile.is_wgmma() {
        true => wgmma::source(config, card.capability)?,
        false => mma_sync::source(config, card.capability)?,
    })
}

/// Checks that every format has a configuration on a card: the other tests would pass without one.
fn every_format(card: Card, configs: &[Config]) -> Result<(), Failed> {
    let values = Bits::ALL.into_iter().flat_map(|bits| Sparsity::ALL.map(|sparsity| (bits, sparsity)));
    for (bits, sparsity, group) in values.flat_map(|(bits, sparsity)| GroupSize::ALL.map(|group| (bits, sparsity, group))) {
        for (zero_points, bf16) in [(false, false), (false, true), (true, false), (true, true)] {
            let is_there = |config: &Config| {
                let Config { tile, group: of, bits: width, zero_points: zeros, bf16: dtype, .. } = *config;
                (of, width, zeros, dtype, tile.sparsity()) == (group, bits, zero_points, bf16, sparsity)
            };
            if !configs.iter().any(is_there) {
                let limit = shared_limit(card.capability);
                return Err(Failed::from(format!(
                    "no configuration of {sparsity} {bits} weights fits {limit} bytes of shared memory with group {group}, zero points \
                     {zero_points}, bf16 {bf16}"
                )));
            }
        }
    }
    Ok(())
}
