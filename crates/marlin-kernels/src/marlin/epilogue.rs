//! From the warps' sums to the output: added along K in shared memory, then across blocks, then scaled, biased and written.

use super::config::{CHUNK_N, Config};
use super::kernel::Lengths;
use super::pipeline::sync_consumers;
use super::stripe::{Place, stripe_start};
use crate::ptx::{F4, lane, load_marked, store_marked};
use cubecl::prelude::*;

/// Sums of another block that a thread waits for at a time.
const LOADS_IN_FLIGHT: usize = 8;

/// Ends the block's part of a tile.
///
/// A part that is not the tail of its tile is left in the block's place of `partials`. A tail adds the sums of the blocks before it, from the
/// nearest to the farthest, and writes the output: the order never changes, so the same inputs give the same bits. A block waits only for
/// blocks that were started before it.
///
/// Each sum travels with its mark in one 64-bit word, so no fence and no flag stands between blocks. Whoever reads a word clears it, for the
/// next launch.
#[cube]
pub(super) fn finish<F: Float>(
    sums: &Array<F4>,
    reduce: &mut Shared<[f32]>,
    scales: &[F],
    bias: &ComptimeOption<&[F]>,
    out: &mut [F],
    partials: u64,
    place: &Place,
    lengths: &Lengths,
    #[comptime] config: Config,
) {
    let columns = comptime!(config.tile.columns() as u32);
    let threads = comptime!(config.tile.threads() as u32);
    // Of every eight rows a thread has the outputs `i * threads + its number`, row by row.
    let count = comptime!((8 * columns).div_ceil(threads) as usize);
    let outputs = comptime!(config.tile.batch_tiles * count);
    let mut totals = Array::<f32>::new(outputs);
    add_along_k(sums, reduce, &mut totals, count, config);

    let block = CUBE_POS_X;
    let tile_start = place.tile * lengths.depth;
    let tile_bytes = comptime!((8 * config.tile.rows() * config.tile.columns()) as u32);
    let (column, row_block) = lengths.by_row_blocks.div_mod(place.tile);
    let first_column = column * columns;
    let first_row = row_block * comptime!(config.tile.rows() as u32);
    let rows = lengths.m - first_row;
    if place.end == lengths.depth {
        let mut other = block;
        while stripe_start(lengths, other) > tile_start {
            other -= 1;
            add_partial(partials + u64::cast_from(other) * u64::cast_from(tile_bytes), &mut totals, count, rows, config);
        }
        #[unroll]
        for i in 0..outputs {
            let index = output(i, count, config);
            let row = first_row + index / columns;
            let column = first_column + index % columns;
            if has_output(i, count, rows, config) && column < lengths.n {
                let mut total = totals[i];
                if comptime!(!config.grouped()) {
                    total *= f32::cast_from(scales[channel_scale(column) as usize]);
                }
                #[comptime]
                match bias {
                    ComptimeOption::Some(bias) => total += f32::cast_from(bias[column as usize]),
                    ComptimeOption::None => {}
                }
                out[(row * lengths.n + column) as usize] = F::cast_from(total);
            }
        }
    } else {
        let own = partials + u64::cast_from(block) * u64::cast_from(tile_bytes);
        #[unroll]
        for i in 0..outputs {
            if has_output(i, count, rows, config) {
                store_marked(own + u64::cast_from(output(i, count, config) * 8), totals[i], 1u32.runtime());
            }
        }
    }
}

/// Adds the sums of the warps that differ along K, eight rows at a time, always in the same order.
#[cube]
fn add_along_k(
    sums: &Array<F4>,
    reduce: &mut Shared<[f32]>,
    totals: &mut Array<f32>,
    #[comptime] count: usize,
    #[comptime] config: Config,
) {
    let lane = lane();
    let warp = UNIT_POS_X / 32;
    let warp_n = warp % comptime!(config.tile.warps_n as u32);
    let warp_k = warp / comptime!(config.tile.warps_n as u32);
    let stride = comptime!(config.reduce_stride() as u32);
    let own = (warp_k * 8 + lane % 4 * 2) * stride + warp_n * comptime!(CHUNK_N as u32) + lane / 4;
    #[unroll]
    for batch_tile in 0..comptime!(config.tile.batch_tiles) {
        sync_consumers(config);
        #[unroll]
        for j in 0..4usize {
            let sum = sums[comptime!(j * config.tile.batch_tiles + batch_tile)];
            let at = own + comptime!(16 * j as u32);
            reduce[at as usize] = sum.extract(0usize);
            reduce[(at + stride) as usize] = sum.extract(1usize);
            reduce[(at + 8) as usize] = sum.extract(2usize);
            reduce[(at + stride + 8) as usize] = sum.extract(3usize);
        }
        sync_consumers(config);
        #[unroll]
        for i in 0..count {
            let index = UNIT_POS_X + comptime!((i * config.tile.threads()) as u32);
            let place = index / comptime!(config.tile.columns() as u32) * stride + index % comptime!(config.tile.columns() as u32);
            if comptime!(i + 1 < count || count * config.tile.threads() == 8 * config.tile.columns())
                || index < comptime!(8 * config.tile.columns() as u32)
            {
                let mut total = reduce[place as usize];
                #[unroll]
                for k in 1..comptime!(config.tile.warps_k) {
                    total += reduce[(place + comptime!(8 * k as u32) * stride) as usize];
                }
                totals[comptime!(batch_tile * count + i)] = total;
            }
        }
    }
}

/// Adds another block's sums to a thread's totals, once they are there, and clears them.
#[cube]
fn add_partial(partial: u64, totals: &mut Array<f32>, #[comptime] count: usize, rows: u32, #[comptime] config: Config) {
    let outputs = comptime!(config.tile.batch_tiles * count);
    #[unroll]
    for round in 0..comptime!(outputs.div_ceil(LOADS_IN_FLIGHT)) {
        let first = comptime!(round * LOADS_IN_FLIGHT);
        let loads = comptime!(if outputs - first < LOADS_IN_FLIGHT { outputs - first } else { LOADS_IN_FLIGHT });
        let mut values = Array::<f32>::new(loads);
        let mut missing = 1u32.runtime();
        while missing != 0 {
            missing = 0u32.runtime();
            #[unroll]
            for i in 0..loads {
                if has_output(comptime!(first + i), count, rows, config) {
                    let (value, mark) = load_marked(partial + u64::cast_from(output(comptime!(first + i), count, config) * 8));
                    values[i] = value;
                    missing |= mark ^ 1;
                }
            }
        }
        #[unroll]
        for i in 0..loads {
            if has_output(comptime!(first + i), count, rows, config) {
                let place = partial + u64::cast_from(output(comptime!(first + i), count, config) * 8);
                store_marked(place, 0.0f32.runtime(), 0u32.runtime());
                totals[comptime!(first + i)] += values[i];
            }
        }
    }
}

/// Where in its tile a thread's output `i` is, row by row.
#[cube]
fn output(#[comptime] i: usize, #[comptime] count: usize, #[comptime] config: Config) -> u32 {
    let eight_rows = comptime!((i / count * 8 * config.tile.columns()) as u32);
    UNIT_POS_X + comptime!(eight_rows + (i % count * config.tile.threads()) as u32)
}

/// Whether a thread's output `i` is one of the tile's, which has `rows` rows.
#[cube]
fn has_output(#[comptime] i: usize, #[comptime] count: usize, rows: u32, #[comptime] config: Config) -> bool {
    let outputs = comptime!(8 * config.tile.columns());
    let in_tile = output(i, count, config) < rows * comptime!(config.tile.columns() as u32);
    if comptime!(i % count + 1 < count || count * config.tile.threads() == outputs) {
        in_tile
    } else {
        in_tile && UNIT_POS_X < comptime!((outputs - (count - 1) * config.tile.threads()) as u32)
    }
}

/// Where [`ScaleLayout`](marlin_format::layout::ScaleLayout) puts the scale of a column in a weight of one group.
#[cube]
fn channel_scale(column: u32) -> u32 {
    column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2
}
