//! The words and sums of products of e4m3 by e4m3, the same for `wgmma` and `mma.sync`.
//!
//! A word of the weight is a register of fragment A as it is: no instruction converts it.
//!
//! A lane reads one word of a tile at a time. The words of a lane's four sub-tiles are contiguous,
//! so that a sub-tile's words are in every fourth bank of shared memory. Each eight lanes read
//! another sub-tile ([`sub_tile`]), and the warp reads from all banks at once. A warp's columns are
//! therefore those of a whole chunk, which it shares with other warps unless it has four sub-tiles:
//!
//! ```text
//! lanes             0 to 7   8 to 15   16 to 23   24 to 31
//! one sub-tile
//! warp 4i + w           w     w ^ 1     w ^ 2      w ^ 3      sub-tile of chunk i
//! two sub-tiles
//! warp 2i,     j 0     0        1          2          3       sub-tile of chunk i
//!              j 1     1        0          3          2
//! warp 2i + 1, j 0     2        3          0          1
//!              j 1     3        2          1          0
//! four sub-tiles
//! warp i       j        j     j ^ 1     j ^ 2      j ^ 3      sub-tile of chunk i
//! ```

use super::config::Config;
use super::shape::Tile;
use super::sizes::TileSizes;
use super::stripe::{TilePart, tile_place};
use crate::ptx::{F4, U4, half_to_f32, lane, ld_shared_4};
use cubecl::prelude::*;

/// Returns the sub-tile of a chunk that a lane of warp `warp` along N reads as its sub-tile `j`.
#[cube]
pub(crate) fn sub_tile(warp: u32, #[comptime] j: usize, #[comptime] tile: Tile) -> u32 {
    let sub_tiles = comptime!(tile.sub_tiles() as u32);
    (warp % comptime!(4 / sub_tiles) * sub_tiles + comptime!(j as u32)) ^ (lane() / 8)
}

/// Returns the chunk of the tile along N that a warp along N multiplies, or shares with others.
#[cube]
pub(crate) fn chunk(warp: u32, #[comptime] tile: Tile) -> u32 {
    warp / comptime!(4 / tile.sub_tiles() as u32)
}

/// Reads fragment A of 32 rows of K, the `k32`-th of a chunk, from a lane's `words` of a sub-tile
/// in the first row of tiles of the chunk; rows of tiles are `row` bytes apart.
///
/// With `groupID = lane / 4` and `t = lane % 4`, and the rows of K in the order of
/// [`fp8`](crate::fp8) (PTX ISA, "Matrix Fragments for mma.m16n8k32" and "for
/// wgmma.mma_async.m64nNk32"):
///
/// | register | row of A: column of the weight | bytes 0 to 3: rows of K |
/// |---|---|---|
/// | 0 | `groupID`     | `2t`, `2t + 8`, `2t + 1`, `2t + 9` of the first 16 |
/// | 1 | `groupID + 8` | the same |
/// | 2 | `groupID`     | the same of the second 16 |
/// | 3 | `groupID + 8` | the same of the second 16 |
#[cube]
pub(crate) fn fragment(words: u32, #[comptime] k32: usize, #[comptime] row: u32) -> U4 {
    let mut fragment = U4::new(0u32);
    #[unroll]
    for register in 0..4usize {
        let rows = comptime!((4 * k32 + register) as u32);
        fragment.insert(register, ld_shared_4(words + comptime!(rows * row)));
    }
    fragment
}

/// Returns the scales of an accumulator's four elements, of columns `groupID` and `groupID + 8`,
/// for a weight with a scale for each 128 rows of K. `scales` is the address of the lane's pair.
#[cube]
pub(crate) fn column_scales(scales: u32, #[comptime] config: Config) -> F4 {
    let pair = ld_shared_4(scales);
    let high = half_to_f32(pair, true, config.bf16);
    let mut scale = F4::new(half_to_f32(pair, false, config.bf16));
    scale.insert(2usize, high);
    scale.insert(3usize, high);
    scale
}

/// Multiplies the sums of a tile by the scales of its rows of activations.
#[cube]
pub(crate) fn scale_rows(
    sums: &mut Array<F4>,
    scales: &ComptimeOption<&[f32]>,
    part: &TilePart,
    sizes: &TileSizes,
    #[comptime] config: Config,
) {
    #[comptime]
    match scales {
        ComptimeOption::Some(scales) => {
            let batch_tiles = comptime!(config.tile.batch_tiles);
            let (_, row_block) = tile_place(part.tile, sizes, config);
            let first = row_block * comptime!(config.tile.rows() as u32) + lane() % 4 * 2;
            #[unroll]
            for tile in 0..batch_tiles {
                let mut scale = F4::new(0.0);
                #[unroll]
                for i in 0..2usize {
                    let row = min(first + comptime!((8 * tile + i) as u32), sizes.m - 1);
                    scale.insert(i, scales[row as usize]);
                    scale.insert(comptime!(2 + i), scales[row as usize]);
                }
                #[unroll]
                for j in 0..config.tile.sub_tiles() {
                    let i = comptime!(j * batch_tiles + tile);
                    sums[i] *= scale;
                }
            }
        }
        ComptimeOption::None => {}
    }
}
