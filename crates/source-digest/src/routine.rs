//! Routines of this workspace: groups of kernels, and the root functions of their sources.

use crate::{Error, Reached, Sources};
use std::path::Path;

/// The crates with kernels: their names in paths, and the files of their root modules.
const CRATES: [(&str, &str); 4] = [
    ("ladder", "examples/ladder/src/lib.rs"),
    ("marlin_nn", "crates/marlin-nn/src/lib.rs"),
    ("marlin_format", "crates/marlin-format/src/lib.rs"),
    ("marlin_kernels", "crates/marlin-kernels/src/lib.rs"),
];

/// A group of kernels with one name in the ledger of machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Routine {
    /// The Marlin matmul with `mma.sync`.
    MmaSync,
    /// The Marlin matmul with `wgmma`.
    Wgmma,
    /// The matmul of one row, on clusters of blocks.
    Gemv,
    /// The products of float weights: the logits of an lm_head, and one row.
    Head,
    /// The RMS norm, the SiLU gate with its multiplication, the conversion of rows of a KV cache,
    /// and the rounding of rows of activations to e4m3.
    Rows,
    /// The attention of a decode step, and of prompts without tensor cores.
    Attention,
    /// The attention of prompts on tensor cores.
    Flash,
    /// The routers' products, the routing of tokens to experts, the gathering of rows for weights
    /// with act-order, and the weighted sums of experts' outputs.
    Experts,
    /// The steps of `examples/ladder`.
    Ladder,
}

impl Routine {
    /// Every routine.
    pub const ALL: [Self; 9] = [
        Self::MmaSync,
        Self::Wgmma,
        Self::Gemv,
        Self::Head,
        Self::Rows,
        Self::Attention,
        Self::Flash,
        Self::Experts,
        Self::Ladder,
    ];

    /// Returns the name of the routine in the ledger and in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MmaSync => "mma_sync",
            Self::Wgmma => "wgmma",
            Self::Gemv => "gemv",
            Self::Head => "head",
            Self::Rows => "rows",
            Self::Attention => "attention",
            Self::Flash => "flash",
            Self::Experts => "experts",
            Self::Ladder => "ladder",
        }
    }

    /// Returns the routine with the given name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|routine| routine.name() == name)
    }

    /// Returns the paths of the functions that generate the CUDA text of the routine's kernels.
    pub const fn roots(self) -> &'static [&'static str] {
        match self {
            Self::MmaSync => &["marlin_kernels::matmul::mma_sync::source"],
            Self::Wgmma => &["marlin_kernels::matmul::wgmma::source"],
            Self::Gemv => &["marlin_kernels::matmul::gemv::source"],
            // The kernel for one row has no text in the ledger, and is a part of a decode step.
            Self::Head => &[
                "marlin_kernels::matmul::lm_head",
                "marlin_kernels::matmul::float_gemv",
            ],
            Self::Rows => &[
                "marlin_kernels::fp8::source",
                "marlin_nn::kernels::rms_norm_source",
                "marlin_nn::kernels::gated_source",
                "marlin_nn::kernels::e4m3_cache_sources",
            ],
            Self::Attention => &["marlin_nn::kernels::attention::source"],
            Self::Flash => &["marlin_nn::kernels::flash::source"],
            Self::Experts => &[
                "marlin_kernels::experts::route_sources",
                "marlin_kernels::experts::combine_source",
                "marlin_kernels::experts::gather_source",
                "marlin_kernels::matmul::gemv::experts::expert_source",
                "marlin_kernels::matmul::few_columns::source",
            ],
            Self::Ladder => &["ladder::source::source"],
        }
    }

    /// Returns the sources of the routine.
    ///
    /// # Errors
    /// [`Error::NoRoot`] if one of the routine's functions is not in `sources`.
    pub fn sources(self, sources: &Sources) -> Result<Reached<'_>, Error> {
        sources.reached_from(self.roots())
    }
}

/// Reads the crates with kernels from the workspace in the folder `root`.
///
/// # Errors
/// An [`Error`] if a file cannot be read or parsed.
pub fn workspace(root: &Path) -> Result<Sources, Error> {
    let files = CRATES.map(|(name, file)| (name, root.join(file)));
    Sources::read(&files.each_ref().map(|(name, file)| (*name, file.as_path())))
}

/// Returns the digest of the sources of a decode step. Figures of whole models use this digest.
///
/// # Errors
/// [`Error::NoRoot`] if one of the functions is not in `sources`.
pub fn step_digest(sources: &Sources) -> Result<String, Error> {
    Ok(step_sources(sources)?.digest())
}

/// Returns the sources of all kernels of a decode step, and of the code of `marlin_nn` that
/// launches them.
///
/// # Errors
/// [`Error::NoRoot`] if one of the functions is not in `sources`.
pub fn step_sources(sources: &Sources) -> Result<Reached<'_>, Error> {
    let kernels = Routine::ALL
        .into_iter()
        .filter(|routine| *routine != Routine::Ladder)
        .flat_map(Routine::roots)
        .copied();
    let roots: Vec<&str> = kernels.chain(["marlin_nn::kernels"]).collect();
    sources.reached_from(&roots)
}
