//! Striped partitioning (Marlin paper, section 3.4): every block gets an equal run of the work,
//! across columns. Of many tiles most are visited whole, in waves: then blocks that run at the same
//! time read the same activations and weights from the second-level cache.

use super::config::Config;
use super::lengths::Lengths;
use cubecl::prelude::*;

/// The first unit of a block; that of the block past the last is the number of units.
///
/// A unit is one step of K of one output tile. The units of a tile follow each other, tiles as
/// [`tile_place`] numbers them.
#[cube]
pub(crate) fn stripe_start(lengths: &Lengths, block: u32) -> u32 {
    block * lengths.units_each + min(block, lengths.blocks_with_one_more)
}

/// The first unit of a block and the one past its last: of its stripe, or in a cluster of its part
/// of K of the cluster's tile.
#[cube]
pub(crate) fn units_of_block(lengths: &Lengths, #[comptime] config: Config) -> (u32, u32) {
    if comptime!(config.tile.is_clustered()) {
        let cluster = comptime!(config.tile.cluster as u32);
        let (tile, rank) = (CUBE_POS_X / cluster * lengths.depth, CUBE_POS_X % cluster);
        (
            tile + lengths.depth * rank / cluster,
            tile + lengths.depth * (rank + 1) / cluster,
        )
    } else {
        (
            stripe_start(lengths, CUBE_POS_X),
            stripe_start(lengths, CUBE_POS_X + 1),
        )
    }
}

/// A block's part of a tile. Tiles are visited from the last to the first.
///
/// A stripe ends in the head of a tile, which another block finishes, and begins in the tail of
/// one. The head comes first, so that its sums are long written when the block that has the tail,
/// its last work, adds them.
///
/// ```text
/// units   |  tile 0   |  tile 1   |  tile 2   |
/// stripes | block 0 | block 1 | block 2 | ...
/// block 1:    tile 1 from its start, then the tail of tile 0, to which it adds the sums of block 0
/// ```
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TilePart {
    /// The output tile.
    pub tile: u32,
    /// The step of K in the tile where the part starts.
    pub first: u32,
    /// One past its last step.
    pub end: u32,
}

#[cube]
impl TilePart {
    /// The last part of a stripe of at least one unit, which is visited first.
    pub fn last(lengths: &Lengths, start: u32, end: u32) -> TilePart {
        let tile = lengths.by_depth.div(end - 1);
        let origin = tile * lengths.depth;
        TilePart {
            tile,
            first: max(start, origin) - origin,
            end: end - origin,
        }
    }

    /// To the part that is visited next: the one before it in the stripe, after the first of which
    /// follow the waves. Past the last it means nothing.
    pub fn next(&mut self, lengths: &Lengths, start: u32, #[comptime] config: Config) {
        self.first = 0u32.runtime();
        self.end = lengths.depth;
        if comptime!(config.tile.has_waves()) && self.tile >= lengths.striped {
            self.tile += CUBE_COUNT_X;
        } else if comptime!(config.tile.has_waves()) && self.tile * lengths.depth <= start {
            self.tile = lengths.striped + CUBE_POS_X;
        } else {
            self.tile -= 1;
            let origin = self.tile * lengths.depth;
            self.first = max(start, origin) - origin;
        }
    }
}

/// The chunk of the weight, along N, that is number `chunk` of a tile in column `column` of tiles.
///
/// With SwiGLU the first half of a tile's chunks are gates, the second the ups that belong to them,
/// which are half of the weight's columns further on.
#[cube]
pub(crate) fn weight_chunk(
    column: u32,
    chunk: u32,
    lengths: &Lengths,
    #[comptime] config: Config,
) -> u32 {
    if comptime!(config.is_gated()) {
        let half = comptime!(config.tile.chunks_n() as u32 / 2);
        column * half + chunk % half + chunk / half * (lengths.chunks_n / 2)
    } else {
        column * comptime!(config.tile.chunks_n() as u32) + chunk
    }
}

/// Blocks of rows that are visited together, for each column of tiles, where there are waves: a
/// wave of an H200 has 16 columns of them.
const ROW_BLOCKS_TOGETHER: u32 = 8;

/// The number of a tile's column, and of its block of rows.
///
/// Tiles are numbered block of rows by block of rows within columns, so that blocks that run at the
/// same time share weights. With waves only some blocks of rows are visited, in all columns, before
/// the next: their activations stay in the second-level cache.
#[cube]
pub(crate) fn tile_place(tile: u32, lengths: &Lengths, #[comptime] config: Config) -> (u32, u32) {
    if comptime!(config.tile.has_waves()) {
        let band = tile / (lengths.columns * ROW_BLOCKS_TOGETHER);
        let first = band * ROW_BLOCKS_TOGETHER;
        let together = min(lengths.row_blocks - first, ROW_BLOCKS_TOGETHER);
        let in_band = tile - first * lengths.columns;
        (in_band / together, first + in_band % together)
    } else {
        lengths.by_row_blocks.div_mod(tile)
    }
}
