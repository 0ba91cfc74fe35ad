//! The products of a warpgroup in e4m3 by `wgmma`, with the weight in registers and the activations
//! in shared memory.
//!
//! The tensor cores add e4m3 products with 14 bits of mantissa, so their sums are added to sums in
//! f32 every 128 rows of K. Two sets of accumulators of all of a warp's outputs do not fit in the
//! registers. A warp therefore multiplies in two halves ([`Half`]), each over a whole chunk of 128
//! rows of K, with the same accumulators: both halves of the tile's 256 rows of activations with
//! one sub-tile of the weight, or two sub-tiles with 128 rows. While a warpgroup adds, the other
//! one multiplies.
//!
//! The words of the next step, or of the second sub-tile, are loaded while products run
//! ([`fragment`]). In the loop alone on an H200, with 256 rows, the tensor cores are busy 99 % of
//! the time, and 85 % if a step loads its own words first.

use super::pipeline::PipelineState;
use super::warpgroup::{accumulator, words_row};
use crate::ptx::{
    F4, U4, lane, wgmma_b, wgmma_commit_group, wgmma_descriptor, wgmma_e4m3, wgmma_fence,
    wgmma_more, wgmma_wait_group,
};
use crate::tile::config::Config;
use crate::tile::fp8::{chunk, column_scales, fragment, sub_tile};
use crate::tile::shape::{ATOM_ROW_BYTES, CHUNK_STEPS, TILE_BYTES, Tile};
use cubecl::prelude::*;

/// The number of halves in which a warp multiplies a step.
const HALVES: usize = 2;

/// A half of a warp's outputs, whose products share the accumulators.
#[derive(Debug, Clone, Copy)]
struct Half {
    /// The warp's sub-tile of the weight.
    sub_tile: usize,
    /// The first of the rows of activations.
    row: usize,
}

impl Half {
    fn new(index: usize, tile: &Tile) -> Self {
        if tile.sub_tiles() == HALVES {
            Self {
                sub_tile: index,
                row: 0,
            }
        } else {
            Self {
                sub_tile: 0,
                row: index * half_rows(tile),
            }
        }
    }
}

/// Returns the number of rows of activations of a half.
pub(super) fn half_rows(tile: &Tile) -> usize {
    tile.rows() * tile.sub_tiles() / HALVES
}

/// Multiplies `steps` steps of a tile, and adds the products of a warp's columns to `sums` every
/// 128 rows of K, scaled if the weight has a scale for each 128 rows. All products are complete at
/// the end, and their stages are released.
#[cube]
pub(super) fn multiply(
    state: &mut PipelineState,
    warp: u32,
    steps: u32,
    sums: &mut Array<F4>,
    #[comptime] config: Config,
) {
    let tile = comptime!(config.tile);
    // The first product of a half replaces the accumulators.
    wgmma_more(0u32.runtime());
    // Two sets of fragments: of the two sub-tiles, or of a step and the next one.
    let mut a = Array::<U4>::new(comptime!(2 * CHUNK_STEPS));
    state.wait();
    load(&mut a, 0usize, state.stage, warp, 0usize, config);
    for step in 0..steps {
        // A copy, since the state moves on; uniform, as the descriptor has to be.
        let stage = plane_broadcast(state.stage, 0u32);
        let activations = stage + comptime!(config.activations_offset() as u32);
        state.next(config);
        #[unroll]
        for i in 0..HALVES {
            let half = comptime!(Half::new(i, &tile));
            let descriptor =
                wgmma_descriptor(activations + comptime!((half.row * ATOM_ROW_BYTES) as u32));
            wgmma_fence();
            #[unroll]
            for k32 in 0..CHUNK_STEPS {
                wgmma_b(descriptor + comptime!(2 * k32 as u32));
                wgmma_e4m3(
                    a[comptime!(half.sub_tile * CHUNK_STEPS + k32)],
                    0usize,
                    comptime!(half_rows(&tile)),
                    comptime!(k32 == 0),
                );
            }
            wgmma_commit_group();
            let scales = scales(stage, warp, half.sub_tile, config);
            let has_two = comptime!(tile.sub_tiles() == HALVES);
            if comptime!(has_two && i == 0) {
                load(&mut a, 1usize, stage, warp, 1usize, config);
            } else if comptime!(has_two || i == 0) {
                if step + 1 < steps {
                    state.wait();
                    let set = comptime!(usize::from(!has_two));
                    load(&mut a, set, state.stage, warp, 0usize, config);
                }
            }
            wgmma_wait_group(0usize);
            add(sums, half, scales, config);
        }
        if comptime!(tile.sub_tiles() == 1) {
            #[unroll]
            for k32 in 0..CHUNK_STEPS {
                a[k32] = a[comptime!(CHUNK_STEPS + k32)];
            }
        }
        state.release_last();
    }
}

/// Adds the accumulators to the sums of a half, multiplied by the scales if the weight has a scale
/// for each 128 rows.
#[cube]
fn add(sums: &mut Array<F4>, #[comptime] half: Half, scales: F4, #[comptime] config: Config) {
    let first = comptime!(half.sub_tile * config.tile.batch_tiles + half.row / 8);
    #[unroll]
    for tile in 0..comptime!(half_rows(&config.tile) / 8) {
        let i = comptime!(first + tile);
        sums[i] = if comptime!(config.grouped()) {
            fma(accumulator(tile), scales, sums[i])
        } else {
            sums[i] + accumulator(tile)
        };
    }
}

/// Reads the scales of a warp's sub-tile `j` from a stage, if the weight has a scale for each 128
/// rows.
#[cube]
fn scales(stage: u32, warp: u32, #[comptime] j: usize, #[comptime] config: Config) -> F4 {
    if comptime!(config.grouped()) {
        column_scales(
            stage
                + comptime!(config.scales_offset() as u32)
                + chunk(warp, config.tile) * comptime!(config.scales_bytes() as u32)
                + lane() / 4 * 16
                + sub_tile(warp, j, config.tile) * 4,
            config,
        )
    } else {
        F4::new(1.0)
    }
}

/// Reads the fragments A of a warp's sub-tile `j` from a stage into set `set` of `a`.
#[cube]
fn load(
    a: &mut Array<U4>,
    #[comptime] set: usize,
    stage: u32,
    warp: u32,
    #[comptime] j: usize,
    #[comptime] config: Config,
) {
    let words = stage
        + chunk(warp, config.tile) * comptime!(TILE_BYTES as u32)
        + lane() * 16
        + sub_tile(warp, j, config.tile) * 4;
    #[unroll]
    for k32 in 0..CHUNK_STEPS {
        a[comptime!(set * CHUNK_STEPS + k32)] = fragment(words, k32, words_row(config));
    }
}
