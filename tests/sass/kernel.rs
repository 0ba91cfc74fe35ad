//! The kernels whose machine code the proof checks.

use crate::listing::Code;
use crate::toolchain::Compiled;
use crate::{Card, Coverage, decode, ladder, pairs, rules, subjects, tiles};
use ::ladder::source::source as ladder_source;
use marlin_kernels::inspect::{KernelSource, tile_source};
use marlin_kernels::tile::Config;
use source_digest::Routine;
use std::error::Error;

/// A kernel that is compiled for a card.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The card.
    pub card: Card,
    /// The name of the kernel in the card's ledger.
    pub name: String,
    /// The name of the kernels that are compiled together: those of a tile, or of a routine.
    pub unit: String,
    /// The kind of kernel, with its configuration.
    pub subject: Subject,
}

/// The kind of a kernel, with its configuration.
#[derive(Debug, Clone)]
pub enum Subject {
    /// A configuration of a Marlin kernel.
    Tile(Config),
    /// A kernel of a decode step other than a Marlin kernel.
    Decode(decode::Subject),
    /// A step of `examples/ladder`.
    Ladder {
        /// The number of the step, 1 to 5.
        step: usize,
        /// The number of rows of activations.
        m: usize,
    },
}

impl Kernel {
    /// Returns the routine whose sources make the CUDA text.
    pub fn routine(&self) -> Routine {
        match &self.subject {
            Subject::Tile(config) if config.tile.is_wgmma() => Routine::Wgmma,
            Subject::Tile(_) => Routine::MmaSync,
            Subject::Decode(subject) => subject.routine(),
            Subject::Ladder { .. } => Routine::Ladder,
        }
    }

    /// Returns the number of pairs of weights that the machine code dequantises; 0 unless the
    /// kernel is a Marlin kernel.
    pub fn pairs(&self, code: &Code) -> usize {
        match &self.subject {
            Subject::Tile(config) => rules::Counts::of(config, code).pairs,
            _ => 0,
        }
    }
}

/// Returns the CUDA text of a kernel.
pub fn source(kernel: &Kernel) -> Result<KernelSource, Box<dyn Error>> {
    let capability = kernel.card.capability;
    Ok(match &kernel.subject {
        Subject::Tile(config) => tile_source(config, capability)?,
        Subject::Decode(subject) => decode::source(subject, capability)?,
        Subject::Ladder { step, m } => ladder_source(*step, *m, capability)?,
    })
}

/// Returns messages for the rules that a kernel's machine code breaks.
pub fn broken(kernel: &Kernel, compiled: &Compiled) -> Vec<String> {
    let capability = kernel.card.capability;
    match &kernel.subject {
        Subject::Tile(config) => rules::broken(capability, config, compiled),
        Subject::Decode(subject) => decode::broken(subject, capability, compiled),
        Subject::Ladder { step, .. } => ladder::broken(capability, *step, compiled),
    }
}

/// Returns the kernel of a configuration of a tile.
fn tile(card: Card, config: Config) -> Kernel {
    Kernel {
        card,
        name: tiles::name(&config),
        unit: tiles::unit(&config),
        subject: Subject::Tile(config),
    }
}

/// Returns every kernel that is compiled for a card. If `whole` is true, it includes every
/// configuration of a tile instead of those that the card's coverage selects.
pub fn all(card: Card, whole: bool) -> Result<Vec<Kernel>, String> {
    let mut kernels: Vec<Kernel> = Vec::new();
    let recorded = tiles::recorded(card)?;
    for of_tile in tiles::by_tile(card) {
        let coverage = of_tile
            .first()
            .map_or(card.coverage, |config| card.coverage_of(&config.tile));
        let chosen = match coverage {
            _ if whole => of_tile,
            Coverage::Pairs => {
                let chosen = pairs::cover(&of_tile);
                of_tile
                    .into_iter()
                    .filter(|config| chosen.contains(config) || recorded.contains(config))
                    .collect()
            }
            Coverage::SamePtx(_) | Coverage::One => of_tile.into_iter().take(1).collect(),
        };
        kernels.extend(chosen.into_iter().map(|config| tile(card, config)));
    }
    // The card of the records has all pairs of values with experts. On other cards the kernels
    // differ from those without experts as they do on that card.
    for of_tile in tiles::with_experts(card) {
        let chosen = match card.coverage {
            _ if whole => of_tile,
            Coverage::Pairs if card.capability == tiles::RECORDED => pairs::cover(&of_tile),
            _ => of_tile.into_iter().take(1).collect(),
        };
        kernels.extend(chosen.into_iter().map(|config| tile(card, config)));
    }
    kernels.extend(subjects::subjects(card).into_iter().map(|(name, subject)| {
        let unit = subject.routine().name().to_owned();
        Kernel {
            card,
            name,
            unit,
            subject: Subject::Decode(subject),
        }
    }));
    kernels.extend(
        ladder::STEPS
            .into_iter()
            .flat_map(|step| ladder::ROWS.map(|m| (step, m)))
            .map(|(step, m)| Kernel {
                card,
                name: format!("ladder step {step} of {m} rows"),
                unit: Routine::Ladder.name().to_owned(),
                subject: Subject::Ladder { step, m },
            }),
    );
    Ok(kernels)
}
