//! The rows of activations of a tile: consecutive rows of all, or, with experts, rows of one expert
//! in the order of a [`Routing`](crate::experts::Routing).

#[cfg(feature = "cubecl-runtime")]
use {
    super::config::Config,
    super::shape::CHUNK_K,
    super::sizes::TileSizes,
    crate::ptx::{ld_global_l2_16, ld_global_words},
    cubecl::prelude::*,
};

/// The rows of activations that a kernel multiplies, and the matrix that each is multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RowOrder {
    /// All rows in their order, by the only matrix of the weight.
    #[default]
    InOrder,
    /// Rows of tokens [tokens, K], each once for each of its experts, by the experts' matrices. The
    /// output is in the order of experts.
    Gathered,
    /// Rows [tokens x experts of a token, K] in the order of experts, by the experts' matrices. So
    /// is the output.
    Sorted,
}

impl RowOrder {
    /// Returns true if the weight has experts.
    pub const fn has_experts(self) -> bool {
        !matches!(self, Self::InOrder)
    }
}

/// The numbers of rows of a tile with experts, and of a block of a
/// [`Routing`](crate::experts::Routing).
pub const BLOCK_ROWS: [usize; 7] = [8, 16, 24, 32, 40, 80, 128];

/// The maximum number of rows of a tile that gathers its rows: each lane of a warp has one row's
/// token.
pub(crate) const MAX_EXPERT_ROWS: usize = 32;

/// A block of rows of activations: the rows of a tile.
#[cfg(feature = "cubecl-runtime")]
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowBlock {
    /// The first row, of the output and of activations that are not gathered.
    pub first: u32,
    /// The number of rows from the first on: with experts those of the block, otherwise all.
    pub rows: u32,
    /// The expert; without experts not used.
    pub expert: u32,
}

#[cfg(feature = "cubecl-runtime")]
#[cube]
impl RowBlock {
    /// Returns block of rows `number`. `row_blocks` is the address of the routing's blocks; without
    /// experts it is not used. Before the wait for the kernel before (`is_early`), the first-level
    /// cache may have an earlier routing's.
    pub fn new(
        number: u32,
        row_blocks: u64,
        sizes: &TileSizes,
        #[comptime] is_early: bool,
        #[comptime] config: Config,
    ) -> RowBlock {
        if comptime!(config.rows.has_experts()) {
            // After its last tile, a thread block enters one that does not exist.
            let place = min(number, sizes.row_blocks - 1) + 1;
            let place = row_blocks + u64::cast_from(place) * 16;
            let block = if is_early {
                ld_global_l2_16(place)
            } else {
                ld_global_words(place)
            };
            RowBlock {
                expert: block.extract(0usize),
                first: block.extract(1usize),
                rows: block.extract(2usize),
            }
        } else {
            let first = number * comptime!(config.tile.rows() as u32);
            RowBlock {
                first,
                rows: sizes.m - first,
                expert: number,
            }
        }
    }
}

/// Returns the number of groups of an expert's matrix, including those in the padding of K.
#[cfg(feature = "cubecl-runtime")]
#[cube]
pub(crate) fn groups_of_expert(sizes: &TileSizes, #[comptime] config: Config) -> u32 {
    if comptime!(config.grouped()) {
        let rows = comptime!(config.group.rows(0) as u32);
        (sizes.chunks_k * comptime!(CHUNK_K as u32)).div_ceil(rows)
    } else {
        1u32.runtime()
    }
}
