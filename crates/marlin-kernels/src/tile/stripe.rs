//! Striped partitioning (Marlin paper, section 3.4): every block gets an equal run of the work,
//! which may extend across columns of tiles. If there are many tiles, most are computed whole, in
//! waves, so that blocks that run at the same time read the same activations and weights from the
//! second-level cache.

use super::config::Config;
use super::sizes::TileSizes;
use cubecl::prelude::*;

/// Returns the first unit of a block's stripe. For the number past the last block, this is the
/// number of units.
///
/// A unit is one step of K of one output tile. Units are numbered tile by tile, in the tile order
/// of [`tile_place`].
#[cube]
pub(crate) fn stripe_start(sizes: &TileSizes, block: u32) -> u32 {
    block * sizes.units_each + min(block, sizes.blocks_with_one_more)
}

/// Returns the first unit of a block and the unit past its last: of its stripe or, in a cluster, of
/// its part of K of the cluster's tile.
#[cube]
pub(crate) fn units_of_block(sizes: &TileSizes, #[comptime] config: Config) -> (u32, u32) {
    if comptime!(config.tile.is_clustered()) {
        let cluster = comptime!(config.tile.cluster as u32);
        let (tile, rank) = (CUBE_POS_X / cluster * sizes.depth, CUBE_POS_X % cluster);
        (
            tile + sizes.depth * rank / cluster,
            tile + sizes.depth * (rank + 1) / cluster,
        )
    } else {
        (
            stripe_start(sizes, CUBE_POS_X),
            stripe_start(sizes, CUBE_POS_X + 1),
        )
    }
}

/// A block's part of a tile. A block computes its tiles from the last to the first.
///
/// A stripe begins with the tail of one tile, and ends with the head of another tile that another
/// block finishes. The block computes the head first and the tail last. The sums of a head are
/// therefore written long before the block with the tail of the same tile adds them.
///
/// ```text
/// units   |  tile 0   |  tile 1   |  tile 2   |
/// stripes | block 0 | block 1 | block 2 | ...
/// block 1:    tile 1 from its start, then the tail of tile 0, to which it adds the sums of block 0
/// ```
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TilePart {
    /// The number of the output tile.
    pub tile: u32,
    /// The first step of K of the part, counted within the tile.
    pub first: u32,
    /// One past the last step of the part.
    pub end: u32,
}

#[cube]
impl TilePart {
    /// Returns the last part of a stripe of at least one unit, which is computed first.
    pub fn last(sizes: &TileSizes, start: u32, end: u32) -> TilePart {
        let tile = sizes.by_depth.div(end - 1);
        let origin = tile * sizes.depth;
        TilePart {
            tile,
            first: max(start, origin) - origin,
            end: end - origin,
        }
    }

    /// Advances to the part that is computed next: the preceding part of the stripe or, after the
    /// first part of the stripe, the tiles of the waves. After the last part the value is
    /// meaningless.
    pub fn next(&mut self, sizes: &TileSizes, start: u32, #[comptime] config: Config) {
        self.first = 0u32.runtime();
        self.end = sizes.depth;
        if comptime!(config.tile.has_waves()) && self.tile >= sizes.striped {
            self.tile += CUBE_COUNT_X;
        } else if comptime!(config.tile.has_waves()) && self.tile * sizes.depth <= start {
            self.tile = sizes.striped + CUBE_POS_X;
        } else {
            self.tile -= 1;
            let origin = self.tile * sizes.depth;
            self.first = max(start, origin) - origin;
        }
    }
}

/// Returns the index along N of the weight's chunk that is chunk `chunk` of a tile in column
/// `column` of tiles.
///
/// With SwiGLU the first half of a tile's chunks are gates. The second half are the corresponding
/// ups, which are half of the weight's columns further on.
#[cube]
pub(crate) fn weight_chunk(
    column: u32,
    chunk: u32,
    sizes: &TileSizes,
    #[comptime] config: Config,
) -> u32 {
    if comptime!(config.is_gated()) {
        let half = comptime!(config.tile.chunks_n() as u32 / 2);
        column * half + chunk % half + chunk / half * (sizes.chunks_n / 2)
    } else {
        column * comptime!(config.tile.chunks_n() as u32) + chunk
    }
}

/// The number of blocks of rows that are computed together, for each column of tiles, if there are
/// waves. A wave of an H200 then covers 16 columns of tiles.
const ROW_BLOCKS_TOGETHER: u32 = 8;

/// Returns the column of tiles and the block of rows of tile number `tile`.
///
/// Within a column, tiles are numbered by block of rows, so that blocks that run at the same time
/// share weights. With experts, blocks of rows mostly have weights of their own, and tiles are
/// numbered by column. With waves, [`ROW_BLOCKS_TOGETHER`] blocks of rows are numbered in all
/// columns before the next blocks of rows, so that their activations stay in the second-level
/// cache.
#[cube]
pub(crate) fn tile_place(tile: u32, sizes: &TileSizes, #[comptime] config: Config) -> (u32, u32) {
    if comptime!(config.tile.has_waves()) {
        let band = tile / (sizes.columns * ROW_BLOCKS_TOGETHER);
        let first = band * ROW_BLOCKS_TOGETHER;
        let together = min(sizes.row_blocks - first, ROW_BLOCKS_TOGETHER);
        let in_band = tile - first * sizes.columns;
        (in_band / together, first + in_band % together)
    } else if comptime!(config.rows.has_experts()) {
        let (row_block, column) = sizes.by_inner.div_mod(tile);
        (column, row_block)
    } else {
        sizes.by_inner.div_mod(tile)
    }
}

/// Returns the column of tiles of tile number `tile`, as [`tile_place`] does, without waves.
#[cube]
pub(crate) fn tile_column(tile: u32, sizes: &TileSizes, #[comptime] config: Config) -> u32 {
    if comptime!(config.rows.has_experts()) {
        sizes.by_inner.modulo(tile)
    } else {
        sizes.by_inner.div(tile)
    }
}
