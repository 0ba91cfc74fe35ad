//! The products of a warpgroup in e4m3 by `wgmma`, with the weight in registers and the activations
//! in shared memory.
//!
//! The tensor cores add e4m3 products with 14 bits of mantissa, so their sums are added to sums in
//! f32 every 128 rows of K. Two sets of accumulators of all of a warp's columns do not fit in the
//! registers. A warp therefore multiplies its two sub-tiles one after the other, each over a whole
//! chunk of 128 rows of K, with the same accumulators.
//!
//! While a warpgroup adds, the other one may multiply. Each of the four fragments of a sub-tile has
//! registers of its own, so that its products are issued without a wait.
//!
//! The tensor cores are busy for little more than half of the time of Llama 2 7B's gate and up
//! projection with 4096 rows on an H200. A loop of the same products alone keeps them busy all the
//! time, so that the instruction is not the bound. In microseconds of the projection: 753 with turns
//! of the two warpgroups by named barriers, 742 without.
//!
//! A lane reads one word of a tile at a time. The words of a lane's four sub-tiles are contiguous,
//! so that a sub-tile's words are in every fourth bank of shared memory. Each eight lanes read
//! another sub-tile ([`sub_tile`]), and the warp reads from all banks at once. A warp's sub-tiles
//! therefore have columns of the whole chunk, which it shares with another warp:
//!
//! ```text
//! lanes             0 to 7   8 to 15   16 to 23   24 to 31
//! warp 2i,     j 0     0        1          2          3      sub-tile of chunk i
//!              j 1     1        0          3          2
//! warp 2i + 1, j 0     2        3          0          1
//!              j 1     3        2          1          0
//! ```

use super::pipeline::PipelineState;
use super::warpgroup::{accumulator, words_row};
use crate::ptx::{
    F4, U4, half_to_f32, lane, ld_shared_4, wgmma_b, wgmma_commit_group, wgmma_descriptor,
    wgmma_e4m3, wgmma_fence, wgmma_more, wgmma_wait_group,
};
use crate::tile::config::Config;
use crate::tile::floats::e4m3_codes;
use crate::tile::shape::{CHUNK_STEPS, TILE_BYTES};
use crate::tile::sizes::TileSizes;
use crate::tile::stripe::{TilePart, tile_place};
use cubecl::prelude::*;

/// Returns the sub-tile of a chunk that a lane of warp `warp` along N reads as its sub-tile `j`, 0
/// or 1.
#[cube]
pub(crate) fn sub_tile(warp: u32, #[comptime] j: usize) -> u32 {
    (warp % 2 * 2 + comptime!(j as u32)) ^ (lane() / 8)
}

/// Waits for the stage of a step, and adds the products of a warp's columns and 128 rows of K to
/// `sums`, scaled if the weight has a scale for each 128 rows. All products are complete at the end.
#[cube]
pub(super) fn multiply(
    state: &PipelineState,
    warp: u32,
    sums: &mut Array<F4>,
    #[comptime] config: Config,
) {
    let words_row = words_row(config);
    let words = state.stage + warp / 2 * comptime!(TILE_BYTES as u32) + lane() * 16;
    let descriptor = wgmma_descriptor(plane_broadcast(
        state.stage + comptime!(config.activations_offset() as u32),
        0u32,
    ));
    // The first product of a sub-tile replaces the accumulators.
    wgmma_more(0u32.runtime());
    state.wait();
    let mut a_words = Array::<u32>::new(8usize);
    let mut a = Array::<U4>::new(CHUNK_STEPS);
    #[unroll]
    for step in 0..2usize {
        load(&mut a_words, words, warp, step, words_row, config);
    }
    a[0usize] = fragment(&a_words, 0usize);
    #[unroll]
    for j in 0..2usize {
        #[unroll]
        for i in 0..CHUNK_STEPS {
            let step = comptime!(j * CHUNK_STEPS + i);
            wgmma_b(descriptor + comptime!(2 * i as u32));
            wgmma_fence();
            wgmma_e4m3(
                a[i],
                0usize,
                comptime!(config.tile.rows()),
                comptime!(i == 0),
            );
            wgmma_commit_group();
            if comptime!(step + 2 < 2 * CHUNK_STEPS) {
                load(
                    &mut a_words,
                    words,
                    warp,
                    comptime!(step + 2),
                    words_row,
                    config,
                );
            }
            if comptime!(i + 1 < CHUNK_STEPS) {
                a[comptime!(i + 1)] = fragment(&a_words, comptime!(step + 1));
            }
        }
        let scales = scales(state.stage, warp, j, config);
        if comptime!(j == 0) {
            // The first product is done, and the registers of its fragment are free.
            wgmma_wait_group(comptime!(CHUNK_STEPS - 1));
            a[0usize] = fragment(&a_words, CHUNK_STEPS);
        }
        wgmma_wait_group(0usize);
        add(sums, j, scales, config);
    }
}

/// Adds the accumulators to the sums of sub-tile `j`, multiplied by a pair of scales, of columns
/// `groupID` and `groupID + 8`, if the weight has a scale for each 128 rows.
#[cube]
fn add(sums: &mut Array<F4>, #[comptime] j: usize, scales: u32, #[comptime] config: Config) {
    let batch_tiles = comptime!(config.tile.batch_tiles);
    let high = half_to_f32(scales, true, config.bf16);
    let mut scale = F4::new(half_to_f32(scales, false, config.bf16));
    scale.insert(2usize, high);
    scale.insert(3usize, high);
    #[unroll]
    for tile in 0..batch_tiles {
        let i = comptime!(j * batch_tiles + tile);
        sums[i] = if comptime!(config.grouped()) {
            fma(accumulator(tile), scale, sums[i])
        } else {
            sums[i] + accumulator(tile)
        };
    }
}

/// Multiplies the sums of a tile by the scales of its rows of activations, if they have scales.
#[cube]
pub(super) fn scale(
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
                for j in 0..2usize {
                    let i = comptime!(j * batch_tiles + tile);
                    sums[i] *= scale;
                }
            }
        }
        ComptimeOption::None => {}
    }
}

/// Reads a pair of scales of a lane's sub-tile `j` from the stage, if the weight has a scale for each
/// 128 rows.
#[cube]
fn scales(stage: u32, warp: u32, #[comptime] j: usize, #[comptime] config: Config) -> u32 {
    if comptime!(config.grouped()) {
        let chunk = warp / 2 * comptime!(config.scales_bytes() as u32) + lane() / 4 * 16;
        ld_shared_4(
            stage + comptime!(config.scales_offset() as u32) + chunk + sub_tile(warp, j) * 4,
        )
    } else {
        0u32.runtime()
    }
}

/// Reads a lane's words of a step, one of each of its four tiles, into one of two alternating sets
/// of registers. The first four steps are those of sub-tile 0.
#[cube]
fn load(
    sets: &mut Array<u32>,
    words: u32,
    warp: u32,
    #[comptime] step: usize,
    #[comptime] words_row: u32,
    #[comptime] config: Config,
) {
    let tiles = comptime!(config.tiles_in_step());
    let own = words + sub_tile(warp, comptime!(step / CHUNK_STEPS)) * 4;
    #[unroll]
    for i in 0..tiles {
        let row = comptime!((step % CHUNK_STEPS * tiles + i) as u32);
        sets[comptime!(step % 2 * tiles + i)] = ld_shared_4(own + comptime!(row * words_row));
    }
}

/// Returns fragment A of a step of 32 rows of K.
///
/// With `groupID = lane / 4` and `t = lane % 4`, and the rows of K in the order of
/// [`fp8`](crate::fp8) (PTX ISA, "Matrix Fragments for wgmma.mma_async.m64nNk32"):
///
/// | register | row of A: column of the weight | bytes: rows of K |
/// |---|---|---|
/// | 0 | `groupID`     | `2t`, `2t + 1`, `2t + 8`, `2t + 9` of the first 16 |
/// | 1 | `groupID + 8` | the same |
/// | 2 | `groupID`     | the same of the second 16 |
/// | 3 | `groupID + 8` | the same of the second 16 |
#[cube]
fn fragment(sets: &Array<u32>, #[comptime] step: usize) -> U4 {
    let first = comptime!(step % 2 * 4);
    let mut a = U4::new(0u32);
    #[unroll]
    for half in 0..2usize {
        let at = comptime!(first + 2 * half);
        let (low, high) = e4m3_codes(sets[at], sets[comptime!(at + 1)]);
        a.insert(comptime!(2 * half), low);
        a.insert(comptime!(2 * half + 1), high);
    }
    a
}
