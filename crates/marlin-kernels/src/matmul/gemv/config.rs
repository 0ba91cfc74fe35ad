use crate::tile::candidates::Format;
use crate::tile::config::METADATA_ROWS;
use crate::tile::lengths::NibbleMasks;
use crate::tile::{self, Product, Tile};
use crate::{Epilogue, Prologue};
use cubecl::prelude::*;
use marlin_format::{Bits, GroupSize, Sparsity};

/// Columns of a block: those of a tile of [`MarlinLayout`](marlin_format::layout::MarlinLayout).
pub(super) const COLUMNS: usize = tile::config::CHUNK_N;
/// Warps of a block.
pub(super) const WARPS: usize = 4;
/// Threads of a block.
pub(super) const THREADS: usize = 32 * WARPS;

/// Everything that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// Blocks among which K is split: one of [`CLUSTERS`](super::CLUSTERS).
    pub blocks: usize,
    /// Rows of K that share a scale: fewer than all.
    pub group: GroupSize,
    /// Width of a weight.
    pub bits: Bits,
    /// True if the weight has zero points; otherwise they are the middle everywhere, 8 or 128.
    pub zero_points: bool,
    /// True if activations, scales, bias and output are in bf16; otherwise f16.
    pub bf16: bool,
    /// The values of the weight that are stored.
    pub sparsity: Sparsity,
    /// The operation on the activations.
    pub prologue: Prologue,
    /// The operation on the output.
    pub epilogue: Epilogue,
}

impl Config {
    /// The configuration of a format, where K is split among `blocks` blocks.
    pub(crate) fn new(blocks: usize, format: &Format, prologue: Prologue) -> Self {
        let Format {
            group,
            bits,
            zero_points,
            bf16,
            sparsity,
            epilogue,
        } = *format;
        Self {
            blocks,
            group,
            bits,
            zero_points,
            bf16,
            sparsity,
            prologue,
            epilogue,
        }
    }

    /// Returns true if the activations are normalised first.
    pub(super) fn has_norm(&self) -> bool {
        self.prologue == Prologue::AddRmsNorm
    }

    /// Returns true if gates and ups are multiplied: a cluster has a tile of gates and the tile of
    /// ups that belongs to it.
    pub(super) fn is_gated(&self) -> bool {
        self.epilogue == Epilogue::SwiGlu
    }

    /// Blocks of a cluster: those among which K is split, for each of its tiles.
    pub(super) fn cluster(&self) -> usize {
        self.blocks * self.epilogue.columns()
    }

    /// Returns true if the weight is 2:4.
    pub(super) fn is_sparse(&self) -> bool {
        self.sparsity == Sparsity::TwoFour
    }

    /// Chunks along K of which a step consists, 64 stored rows each. For two of 8 bits, or of a 2:4
    /// weight in small groups or with zero points, there are too few registers.
    pub(super) fn chunks(&self) -> usize {
        let is_large = self.bits == Bits::Eight
            || self.is_sparse() && (self.group != GroupSize::G128 || self.zero_points);
        if is_large { 1 } else { 2 }
    }

    /// Rows of tiles of words in a chunk.
    pub(super) fn word_rows(&self) -> usize {
        self.products().word_rows()
    }

    /// Rows of K that a warp takes at a time.
    pub(super) fn step_k(&self) -> usize {
        self.chunks() * self.products().tile.chunk_rows()
    }

    /// Values of the row that a lane has of a step.
    pub(super) fn lane_values(&self) -> usize {
        self.step_k() / 32
    }

    /// Tiles of words in a step, each one 16-byte load of every lane.
    pub(super) fn tiles(&self) -> usize {
        self.chunks() * self.word_rows()
    }

    /// Tiles of words and of metadata in a step.
    pub(super) fn loads(&self) -> usize {
        self.tiles()
            + if self.is_sparse() {
                self.chunks() * METADATA_ROWS
            } else {
                0
            }
    }

    /// The format as `fragment.rs` knows it: sums are scaled, and of a dense weight of 4 bits
    /// stored values are multiplied.
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
            bits: self.bits,
            zero_points: self.zero_points,
            bf16: self.bf16,
            epilogue: self.epilogue,
        }
    }

    pub(super) fn cluster_dim(&self) -> CubeDim {
        CubeDim::new_1d(self.cluster() as u32)
    }

    /// Steps of a group: more than one only where a step has fewer rows.
    pub(super) fn steps_in_group(&self) -> usize {
        self.group.rows(self.step_k()).div_ceil(self.step_k())
    }

    /// Groups that a step lies in.
    pub(super) fn groups_in_step(&self) -> usize {
        self.step_k().div_ceil(self.group.rows(self.step_k()))
    }
}

/// Lengths of a problem as the kernel sees them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Lengths {
    /// Output features: with SwiGLU half of the weight's columns.
    pub n: u32,
    /// Input features, a multiple of 8.
    pub k: u32,
    /// Columns of tiles of the weight: N / 64, rounded up.
    pub tiles_n: u32,
    /// Rows of tiles of the weight, rounded up to chunks.
    pub tiles_k: u32,
    /// Groups of the weight with those of its padding.
    pub groups: u32,
    /// Masks of the nibbles of a word.
    pub masks: NibbleMasks,
}
