//! The positions of fragments in memory for steps 4 and 5, as functions that kernels and tests
//! share, and the final sum over the warps of a block.
//!
//! A warp multiplies a *chunk* at a time, 64 rows of K by 64 columns. The product is computed
//! transposed: the fragment A of `mma.m16n8k16` is 16 columns of the weight by 16 rows of K, the
//! fragment B the same 16 rows of K by eight rows of activations. With `g = lane / 4` and `t = lane
//! % 4`, a lane holds (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"):
//!
//! | register | holds | element |
//! |---|---|---|
//! | `a0` | rows of K `2t`, `2t + 1` | column `g` |
//! | `a1` | rows of K `2t`, `2t + 1` | column `g + 8` |
//! | `a2` | rows of K `2t + 8`, `2t + 9` | column `g` |
//! | `a3` | rows of K `2t + 8`, `2t + 9` | column `g + 8` |
//! | `b0` | rows of K `2t`, `2t + 1` | row `g` of activations |
//! | `b1` | rows of K `2t + 8`, `2t + 9` | row `g` of activations |
//! | `c0`, `c1` | column `g` | rows `2t`, `2t + 1` of activations |
//! | `c2`, `c3` | column `g + 8` | rows `2t`, `2t + 1` of activations |
//!
//! Eight weights, two for each of `a0` to `a3`, are one word of
//! [`MarlinLayout::in_chunks`](marlin_format::layout::MarlinLayout::in_chunks), and a lane's words
//! of four such fragments, 64 columns, are 16 bytes.

use cubecl::prelude::*;
use half::f16;
use marlin_kernels::ptx::{F4, lane};

/// The number of warps of a block, which multiply the chunks of K in turn.
pub const WARPS: usize = 8;
/// The number of rows of K of a chunk, and also of its columns.
pub const CHUNK: usize = 64;
/// The number of floats from one row to the next in the buffer of [`write`]. The four rows that one
/// store writes are in different banks.
const STRIDE: usize = CHUNK + 4;

// ANCHOR: places
/// Returns the position of a lane's words of 16 rows of K by 64 columns, in units of 16 bytes.
/// `chunks_n` is N / 64.
#[cube]
pub fn words_place(k_16: u32, chunk_n: u32, chunks_n: u32, lane: u32) -> u32 {
    (k_16 * chunks_n + chunk_n) * 32 + lane
}

/// Returns the position of a lane's eight scales of 64 columns, in units of 16 bytes. The scale of
/// column `g + 8i` is half `i`.
#[cube]
pub fn scales_place(group: u32, chunk_n: u32, chunks_n: u32, lane: u32) -> u32 {
    (group * chunks_n + chunk_n) * 8 + lane / 4
}

/// Returns the index of the pair of rows that a lane has in `b0`, among the eight pairs of 16 rows
/// of K. The index of the pair in `b1` is larger by four.
#[cube]
pub fn pair_place(lane: u32) -> u32 {
    lane % 4
}

/// Returns the position of a run of eight activations in a tile whose rows have 64 activations, in
/// units of runs. Runs are swizzled within a row. The same run of eight rows, which `ldmatrix`
/// reads at once, thus covers all 32 banks.
#[cube]
pub fn run_place(row: u32, run: u32) -> u32 {
    row * 8 + (run ^ (row % 8))
}
// ANCHOR_END: places

/// Returns the number of n8 tiles of a block for `m` rows of activations: 1, 2, 4 or 8.
pub fn row_tiles(m: usize) -> usize {
    m.div_ceil(8).next_power_of_two().min(8)
}

/// Returns the number of floats of the buffer of [`write`].
pub const fn reduce_floats() -> usize {
    WARPS * 8 * STRIDE
}

// ANCHOR: write
/// Adds the sums of a block's warps, eight rows of activations at a time and always in the same
/// order, and writes the result.
#[cube]
pub(crate) fn write(sums: &Array<F4>, out: &mut [f16], m: u32, n: u32, #[comptime] tiles: usize) {
    let mut parts = Shared::<[f32]>::new_slice(comptime!(reduce_floats()));
    let (lane, warp) = (lane(), UNIT_POS_X / 32);
    let own = (warp * 8 + lane % 4 * 2) * comptime!(STRIDE as u32) + lane / 4;
    #[unroll]
    for tile in 0..tiles {
        sync_cube();
        #[unroll]
        for j in 0..4usize {
            let sum = sums[comptime!(j * tiles + tile)];
            let place = (own + comptime!(16 * j as u32)) as usize;
            parts[place] = sum.extract(0usize);
            parts[place + STRIDE] = sum.extract(1usize);
            parts[place + 8] = sum.extract(2usize);
            parts[place + comptime!(STRIDE + 8)] = sum.extract(3usize);
        }
        sync_cube();
        #[unroll]
        for half in 0..2u32 {
            let row_in_tile = UNIT_POS_X / 64 + comptime!(4 * half);
            let place = row_in_tile * comptime!(STRIDE as u32) + UNIT_POS_X % 64;
            let mut sum = 0.0f32;
            #[unroll]
            for w in 0..WARPS {
                sum += parts[place as usize + comptime!(8 * w * STRIDE)];
            }
            let row =
                (CUBE_POS_Y * comptime!(tiles as u32) + comptime!(tile as u32)) * 8 + row_in_tile;
            if row < m {
                out[(row * n + CUBE_POS_X * 64 + UNIT_POS_X % 64) as usize] = f16::cast_from(sum);
            }
        }
    }
}
// ANCHOR_END: write
