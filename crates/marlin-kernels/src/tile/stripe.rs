//! Striped partitioning (Marlin paper, section 3.4): every block gets an equal run of the work, across columns.

use super::lengths::Lengths;
use cubecl::prelude::*;

/// The first unit of a block; that of the block past the last is the number of units.
///
/// A unit is one step of K of one output tile. Tiles are numbered block of rows by block of rows within columns, and the units of a tile
/// follow each other, so that blocks that run at the same time share weights.
#[cube]
pub(crate) fn stripe_start(lengths: &Lengths, block: u32) -> u32 {
    block * lengths.units_each + min(block, lengths.blocks_with_one_more)
}

/// A block's part of a tile. Tiles are visited from the last to the first.
///
/// A stripe ends in the head of a tile, which another block finishes, and begins in the tail of one. The head comes first, so that its sums
/// are long written when the block that has the tail, its last work, adds them.
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
        TilePart { tile, first: max(start, origin) - origin, end: end - origin }
    }

    /// To the part before this one; past the start of the stripe it means nothing.
    pub fn step_back(&mut self, lengths: &Lengths, start: u32) {
        self.tile -= 1;
        let origin = self.tile * lengths.depth;
        self.first = max(start, origin) - origin;
        self.end = lengths.depth;
    }
}
