//! The proof: checks the machine code of the kernels for every card without a GPU, and compares it
//! with the ledger.
//!
//! CubeCL's CUDA text is compiled by NVRTC with CubeCL's options, then by ptxas, and listed by
//! nvdisasm. `rules.rs` has the rules for the listing. `ledger/<arch>.tsv` holds the figures on
//! each kernel. Kernels whose sources have not changed since are not compiled again, except for a
//! random sample. `cargo xtask proof` compiles everything, `cargo xtask proof --bless` rewrites the
//! ledger, and `cargo xtask test` runs the proof with all other tests.

mod check;
mod decode;
mod kernel;
mod ladder;
mod ledger;
mod listing;
mod nvrtc;
mod pairs;
mod prove;
mod records;
mod report;
mod rules;
mod samples;
mod sources;
mod subjects;
mod tiles;
mod toolchain;

use kernel::Kernel;
use libtest_mimic::Arguments;
use marlin_kernels::tile::Tile;
use prove::{Mode, Proof};
use report::Report;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use toolchain::Toolchain;

/// The environment variable with the folder of NVIDIA's compiler, which `cargo xtask` sets.
const FOLDER: &str = "BURN_MARLIN_NVIDIA";

/// A card that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card {
    /// The architecture, as CubeCL names it to NVRTC.
    pub arch: &'static str,
    /// The compute capability, 80 for 8.0.
    pub capability: u32,
    /// The configurations of a tile that are compiled; see [`coverage_of`](Self::coverage_of).
    pub coverage: Coverage,
}

impl Card {
    /// Returns the coverage of a tile. The card whose PTX is that of another one has products of
    /// e4m3, which the other one has not.
    pub fn coverage_of(&self, tile: &Tile) -> Coverage {
        match self.coverage {
            Coverage::SamePtx(_) if tile.is_fp8() => Coverage::Pairs,
            coverage => coverage,
        }
    }
}

/// A choice of the configurations of a tile that are compiled for a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    /// Enough configurations that every two values of a format occur together (`pairs.rs`).
    Pairs,
    /// The first configuration. Its PTX must be the PTX for another card, except for the target.
    SamePtx(&'static Card),
    /// The first configuration, which only has to compile.
    One,
}

const SM_86: Card = Card {
    arch: "sm_86",
    capability: 86,
    coverage: Coverage::Pairs,
};
const CARDS: [Card; 5] = [
    Card {
        arch: "sm_80",
        capability: 80,
        coverage: Coverage::Pairs,
    },
    SM_86,
    // ptxas used as many registers and instructions as for sm_86 in 376 of 376 configurations.
    Card {
        arch: "sm_89",
        capability: 89,
        coverage: Coverage::SamePtx(&SM_86),
    },
    Card {
        arch: "sm_90a",
        capability: 90,
        coverage: Coverage::Pairs,
    },
    Card {
        arch: "sm_120",
        capability: 120,
        coverage: Coverage::One,
    },
];

/// Returns the folder of the workspace.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let toolchain = std::env::var_os(FOLDER)
        .map(|folder| Toolchain::load(PathBuf::from(folder)))
        .transpose();
    let toolchain = toolchain.map_err(|error| {
        format!(
            "{FOLDER}: {error}; `cargo xtask proof` sets the compiler up and the variable with it"
        )
    })?;
    let mode = Mode::from_env()?;
    let proof = Arc::new(Proof::new(mode, toolchain, Report::default())?);
    let mut tests = samples::trials();
    tests.extend(pairs::trials());
    tests.push(records::trial());
    for card in CARDS {
        let kernels: Vec<Arc<Kernel>> = kernel::all(card, mode == Mode::All)?
            .into_iter()
            .map(Arc::new)
            .collect();
        tests.extend(prove::trials(&proof, card, kernels));
        tests.push(tiles::every_format(card));
    }
    let conclusion = libtest_mimic::run(arguments, tests);
    proof.report.print();
    if mode == Mode::Bless {
        proof.bless(arguments.filter.is_none() && arguments.skip.is_empty())?;
    }
    Ok(conclusion.exit_code())
}
