use crate::tile::candidates::Format;
use crate::tile::shape::METADATA_ROWS;
use crate::tile::{self, Product, RowOrder, Tile};
use crate::{Epilogue, Prologue};
use marlin_format::{GroupSize, Sparsity, WeightValue};
#[cfg(feature = "cubecl-runtime")]
use {crate::tile::sizes::NibbleMasks, cubecl::prelude::*};

/// The number of columns of a block, equal to the columns of a tile of
/// [`MarlinLayout`](marlin_format::layout::MarlinLayout).
pub(super) const COLUMNS: usize = tile::shape::CHUNK_N;
/// The number of warps of a block.
pub(super) const WARPS: usize = 4;
/// The number of threads of a block.
pub(super) const THREADS: usize = 32 * WARPS;

/// The compile-time configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemvConfig {
    /// The number of blocks among which K is split: one of [`CLUSTERS`](super::CLUSTERS).
    pub blocks: usize,
    /// Rows of K that share a scale; a single group is not supported.
    pub group: GroupSize,
    /// The kind of the weight's values.
    pub value: WeightValue,
    /// True if the weight has zero points; otherwise the zero point is always 8 (4 bits) or 128 (8
    /// bits), and 0 of floats.
    pub zero_points: bool,
    /// True if activations, scales, bias and output are in bf16; otherwise f16.
    pub bf16: bool,
    /// The sparsity of the weight: dense or 2:4.
    pub sparsity: Sparsity,
    /// The operation on the activations.
    pub prologue: Prologue,
    /// The operation on the output.
    pub epilogue: Epilogue,
    /// The number of experts whose outputs a cluster adds; `None` without experts.
    pub experts: Option<usize>,
    /// True if a step of e2m1 in bf16 and groups of 32 with experts is one chunk, which takes half
    /// as many registers as two.
    pub has_short_steps: bool,
}

impl GemvConfig {
    /// Creates the configuration of a format with K split among `blocks` blocks.
    pub(crate) fn new(blocks: usize, format: &Format, prologue: Prologue) -> Self {
        let Format {
            group,
            value,
            zero_points,
            bf16,
            sparsity,
            epilogue,
            ..
        } = *format;
        Self {
            blocks,
            group,
            value,
            zero_points,
            bf16,
            sparsity,
            prologue,
            epilogue,
            experts: None,
            has_short_steps: false,
        }
    }

    /// Returns true if the activations are normalised first.
    pub(super) fn has_norm(&self) -> bool {
        self.prologue == Prologue::AddRmsNorm
    }

    /// Returns true if the epilogue is a SwiGLU. A cluster then has a tile of gates and the
    /// corresponding tile of ups.
    pub(super) fn is_gated(&self) -> bool {
        self.epilogue.is_gated()
    }

    /// Returns the number of blocks of a cluster: `blocks` for each of the cluster's tiles and
    /// experts.
    pub(super) fn cluster(&self) -> usize {
        self.blocks * self.epilogue.columns() * self.experts.unwrap_or(1)
    }

    /// Returns true if the weight is 2:4.
    pub(super) fn is_sparse(&self) -> bool {
        self.sparsity == Sparsity::TwoFour
    }

    /// Returns the number of chunks of a step along K; a chunk is 64 stored rows. There are too few
    /// registers for two chunks of 8 bits, of e2m1 in bf16 and groups of 32 without experts, or of
    /// a 2:4 weight in groups smaller than 128 or with zero points.
    pub(super) fn chunks(&self) -> usize {
        let is_large = self.value.bits() == 8
            || self.is_e2m1_in_bf16() && (self.experts.is_none() || self.has_short_steps)
            || self.is_sparse() && (self.group != GroupSize::G128 || self.zero_points);
        if is_large { 1 } else { 2 }
    }

    /// Returns true for e2m1 in bf16 and groups of 32.
    pub(super) fn is_e2m1_in_bf16(&self) -> bool {
        self.value == WeightValue::E2m1 && self.group == GroupSize::G32 && self.bf16
    }

    /// Returns the number of rows of tiles of words in a chunk.
    pub(super) fn word_rows(&self) -> usize {
        self.products().word_rows()
    }

    /// Returns the number of rows of K in a step of a warp.
    pub(super) fn step_k(&self) -> usize {
        self.chunks() * self.products().tile.chunk_rows()
    }

    /// Returns the number of values of the input row that a lane holds in a step.
    pub(super) fn lane_values(&self) -> usize {
        self.step_k() / 32
    }

    /// Returns the number of tiles of words in a step. Every lane loads 16 bytes of each tile.
    pub(super) fn tiles(&self) -> usize {
        self.chunks() * self.word_rows()
    }

    /// Returns the number of tiles of words and of metadata in a step.
    pub(super) fn loads(&self) -> usize {
        self.tiles()
            + if self.is_sparse() {
                self.chunks() * METADATA_ROWS
            } else {
                0
            }
    }

    /// Returns the tile configuration for the functions of `fragment.rs`: the scales are applied to
    /// the sums, and the stored values of a dense weight of 4 bits are multiplied directly.
    pub(super) fn products(&self) -> tile::Config {
        let product = if self.is_sparse() {
            Product::SparseMmaSync
        } else {
            Product::MmaSync
        };
        let tile = Tile {
            batch_tiles: 1,
            warps_n: 1,
            warps_k: 1,
            cluster: 1,
            stages: 1,
            product,
        };
        tile::Config {
            tile,
            group: self.group,
            value: self.value,
            zero_points: self.zero_points,
            bf16: self.bf16,
            epilogue: self.epilogue,
            rows: RowOrder::InOrder,
        }
    }

    #[cfg(feature = "cubecl-runtime")]
    pub(super) fn cluster_dim(&self) -> CubeDim {
        CubeDim::new_1d(self.cluster() as u32)
    }

    /// Returns the number of steps in a group; more than one only if a step has fewer rows than a
    /// group.
    pub(super) fn steps_in_group(&self) -> usize {
        self.group.rows(self.step_k()).div_ceil(self.step_k())
    }

    /// Returns the number of groups of a step whose scales a lane holds.
    pub(super) fn lane_groups(&self) -> usize {
        if self.group == GroupSize::G16 {
            2
        } else {
            self.groups_in_step()
        }
    }

    /// Returns the number of groups in a step.
    pub(super) fn groups_in_step(&self) -> usize {
        self.step_k().div_ceil(self.group.rows(self.step_k()))
    }
}

/// The lengths of a problem, as runtime arguments of the kernel.
#[cfg(feature = "cubecl-runtime")]
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct GemvSizes {
    /// Output features; with SwiGLU, half of the weight's columns.
    pub n: u32,
    /// Input features, a multiple of 8.
    pub k: u32,
    /// Columns of tiles of the weight: N / 64, rounded up.
    pub tiles_n: u32,
    /// Rows of tiles of the weight, rounded up to chunks.
    pub tiles_k: u32,
    /// Groups of the weight, including its padding.
    pub groups: u32,
    /// Masks that select nibbles of a word.
    pub masks: NibbleMasks,
}
