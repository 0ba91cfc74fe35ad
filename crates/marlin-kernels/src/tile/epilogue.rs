//! The reduction of the warps' sums to the output: sums are added along K in shared memory, then
//! across blocks; then they are scaled, the bias is added, and the result is written.

use super::cluster::Receiver;
use super::config::Config;
use super::exchange;
use super::fp8;
use super::fragment::stored_units;
use super::outputs::{has_output, output, sync_consumers};
use super::rows::RowBlock;
use super::runs::{read_runs, write_runs};
use super::shape::CHUNK_N;
use super::sizes::TileSizes;
use super::stripe::{TilePart, stripe_start, tile_place};
use crate::Epilogue;
use crate::ptx::{F4, ex2_approx, lane, rcp_approx};
use cubecl::prelude::*;

/// Finishes the block's part of a tile. The blocks of a cluster compute one tile together, and each
/// of them adds and writes a share of its rows ([`cluster`](super::cluster)).
///
/// The sums of a part that is not the tail of its tile are written to the block's area of the
/// workspace. The block that computes the tail adds the sums of the preceding blocks, from the
/// nearest to the farthest, and writes the output. The order never changes, so the same inputs give
/// the same bits. A block waits only for blocks that were started before it.
#[cube]
pub(crate) fn finish<F: Float>(
    sums: &Array<F4>,
    reduce: &mut Shared<[f32]>,
    receiver: &Receiver,
    scales: &[F],
    bias: &ComptimeOption<&[F]>,
    row_blocks: u64,
    out: &mut [F],
    workspace: u64,
    part: &TilePart,
    sizes: &TileSizes,
    #[comptime] config: Config,
) {
    let mut totals = Array::<f32>::new(comptime!(config.outputs()));
    let (column, number) = tile_place(part.tile, sizes, config);
    if comptime!(config.tile.is_clustered()) {
        let row_block = RowBlock::new(number, row_blocks, sizes, false, config);
        let (first_row, rows) = (row_block.first, row_block.rows);
        let mut added = Array::<F4>::new(comptime!(
            config.batch_tiles_each() * config.tile.sub_tiles()
        ));
        receiver.exchange(sums, &mut added, config);
        add_along_k(&added, reduce, &mut totals, config);
        let own = receiver.rank * comptime!(8 * config.batch_tiles_each() as u32);
        let rows = max(min(rows, comptime!(config.tile.rows() as u32)), own) - own;
        write::<F>(
            &totals,
            first_row + own,
            rows,
            row_block.expert,
            column,
            scales,
            bias,
            out,
            sizes,
            config,
        );
    } else {
        let row_block = RowBlock::new(number, row_blocks, sizes, false, config);
        let rows = row_block.rows;
        add_along_k(sums, reduce, &mut totals, config);
        if part.end == sizes.depth {
            let mut other = CUBE_POS_X;
            while stripe_start(sizes, other) > part.tile * sizes.depth {
                other -= 1;
                exchange::add(&mut totals, other, workspace, rows, config);
            }
            // With gates and ups of 128 rows, the sums leave no register for the block of rows.
            let row_block = if comptime!(config.has_partial_gates() && config.moves_registers()) {
                RowBlock::new(number, row_blocks, sizes, false, config)
            } else {
                row_block
            };
            write::<F>(
                &totals,
                row_block.first,
                row_block.rows,
                row_block.expert,
                column,
                scales,
                bias,
                out,
                sizes,
                config,
            );
        } else {
            exchange::store(&totals, workspace, rows, config);
        }
    }
}

/// Writes the outputs of a thread's totals: `rows` rows from `first_row` on, of the tile in column
/// `column` of tiles of the matrix of `expert`.
#[cube]
fn write<F: Float>(
    totals: &Array<f32>,
    first_row: u32,
    rows: u32,
    expert: u32,
    column: u32,
    scales: &[F],
    bias: &ComptimeOption<&[F]>,
    out: &mut [F],
    sizes: &TileSizes,
    #[comptime] config: Config,
) {
    let columns = comptime!(config.tile.columns() as u32);
    let first_column = column * comptime!(config.output_columns() as u32);
    if comptime!(config.has_runs()) {
        write_runs::<F>(
            totals,
            first_row,
            rows,
            expert,
            first_column,
            scales,
            bias,
            out,
            sizes,
            config,
        );
    } else {
        #[unroll]
        for i in 0..comptime!(config.outputs() / config.epilogue.columns()) {
            let first = comptime!(i * config.epilogue.columns());
            let index = output(first, config);
            let row = first_row + index / columns;
            let column = first_column + index % columns;
            if has_output(first, rows, config) && column < sizes.n {
                let mut value = scaled_and_biased::<F>(
                    totals[first],
                    column,
                    expert,
                    scales,
                    bias,
                    sizes,
                    config,
                );
                if comptime!(config.is_gated()) {
                    value = gated(
                        value,
                        scaled_and_biased::<F>(
                            totals[comptime!(first + 1)],
                            column + sizes.n,
                            expert,
                            scales,
                            bias,
                            sizes,
                            config,
                        ),
                        config.epilogue,
                    );
                }
                out[(row * sizes.n + column) as usize] = F::cast_from(value);
            }
        }
    }
}

/// Returns a total of a column of an expert's matrix, multiplied by the column's scale if the
/// weight has a single group, plus the bias.
#[cube]
fn scaled_and_biased<F: Float>(
    total: f32,
    column: u32,
    expert: u32,
    scales: &[F],
    bias: &ComptimeOption<&[F]>,
    sizes: &TileSizes,
    #[comptime] config: Config,
) -> f32 {
    let mut total = total;
    if comptime!(!config.grouped()) {
        let place = channel_scale_of_expert(column, expert, sizes, config);
        total *= f32::cast_from(scales[place as usize]);
    }
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            let place = bias_of_expert(column, expert, sizes, config);
            total += f32::cast_from(bias[place as usize]);
        }
        ComptimeOption::None => {}
    }
    total
}

/// Returns the index of a column's scale in the weight of all experts, if each has one group.
#[cube]
pub(super) fn channel_scale_of_expert(
    column: u32,
    expert: u32,
    sizes: &TileSizes,
    #[comptime] config: Config,
) -> u32 {
    let mut place = channel_scale(column);
    if comptime!(config.rows.has_experts()) {
        place += expert * sizes.chunks_n * comptime!(CHUNK_N as u32);
    }
    place
}

/// Returns the index of a column's bias in the biases of all experts.
#[cube]
pub(super) fn bias_of_expert(
    column: u32,
    expert: u32,
    sizes: &TileSizes,
    #[comptime] config: Config,
) -> u32 {
    let mut place = column;
    if comptime!(config.rows.has_experts()) {
        place += expert * sizes.n * comptime!(config.epilogue.columns() as u32);
    }
    place
}

/// Returns the output of a gate and an up, to a relative error of 2^-21. An exact division would
/// take as long as the rest of an output.
#[cube]
pub(crate) fn gated(gate: f32, up: f32, #[comptime] epilogue: Epilogue) -> f32 {
    if comptime!(epilogue == Epilogue::ClampedSwiGlu) {
        let limit = Epilogue::CLAMPED_LIMIT;
        // Unlike `min` and `max`, a selection keeps NaN.
        let gate = select(gate > limit, limit.runtime(), gate);
        let up = select(up > limit, limit.runtime(), up);
        let up = select(up < -limit, (-limit).runtime(), up);
        let slope = comptime!(-Epilogue::CLAMPED_SLOPE * std::f32::consts::LOG2_E);
        gate * rcp_approx(1.0 + ex2_approx(gate * slope)) * (up + 1.0)
    } else {
        gate * rcp_approx(1.0 + ex2_approx(-gate * std::f32::consts::LOG2_E)) * up
    }
}

/// Adds the sums of the warps that differ along K, eight rows at a time, always in the same order.
#[cube]
fn add_along_k(
    sums: &Array<F4>,
    reduce: &mut Shared<[f32]>,
    totals: &mut Array<f32>,
    #[comptime] config: Config,
) {
    let count = comptime!(config.outputs_of_eight_rows());
    let buffers = comptime!(config.reduce_floats() / config.eight_rows_floats());
    let lane = lane();
    let warp = UNIT_POS_X / 32;
    let warp_n = warp % comptime!(config.tile.warps_n as u32);
    let warp_k = warp / comptime!(config.tile.warps_n as u32);
    let stride = comptime!(config.reduce_stride() as u32);
    let (first_unit, second_unit) = comptime!(stored_units(&config));
    let own = (warp_k * 8 + lane % 4 * 2) * stride + first_column(warp_n, config) + lane / 4;
    #[unroll]
    for batch_tile in 0..comptime!(config.batch_tiles_each()) {
        let buffer = comptime!((batch_tile % buffers * config.eight_rows_floats()) as u32);
        // With two buffers, all threads have read the one to be stored when they have met after the
        // last stores.
        if comptime!(buffers == 1) {
            sync_consumers(config);
        }
        #[unroll]
        for j in 0..config.tile.sub_tiles() {
            let sum = sums[comptime!(j * config.batch_tiles_each() + batch_tile)];
            let at = if comptime!(config.tile.is_fp8()) {
                own + fp8::sub_tile(warp_n, j, config.tile) * 16 + buffer
            } else {
                own + comptime!(16 * j as u32 + buffer)
            };
            reduce[at as usize] = sum.extract(0usize) * first_unit;
            reduce[(at + stride) as usize] = sum.extract(1usize) * first_unit;
            reduce[(at + 8) as usize] = sum.extract(2usize) * second_unit;
            reduce[(at + stride + 8) as usize] = sum.extract(3usize) * second_unit;
        }
        sync_consumers(config);
        if comptime!(config.has_runs()) {
            read_runs(reduce, totals, batch_tile, config);
        } else {
            #[unroll]
            for i in 0..count {
                let mut index = output(i, config);
                if comptime!(
                    (i / config.epilogue.columns() + 1) * config.tile.threads()
                        > 8 * config.output_columns()
                ) {
                    // A thread without an output here computes another thread's total, to avoid a
                    // branch.
                    index = min(index, comptime!(8 * config.tile.columns() as u32 - 1));
                }
                let place = index / comptime!(config.tile.columns() as u32) * stride
                    + index % comptime!(config.tile.columns() as u32);
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

/// Returns the first column of a tile whose sums a warp has; with e4m3, that of the chunk that a
/// warp shares with others.
#[cube]
fn first_column(warp_n: u32, #[comptime] config: Config) -> u32 {
    if comptime!(config.tile.is_fp8()) {
        fp8::chunk(warp_n, config.tile) * comptime!(CHUNK_N as u32)
    } else {
        warp_n * comptime!(16 * config.tile.sub_tiles() as u32)
    }
}

/// Returns the index of a column's scale in a weight of one group, as
/// [`ScaleLayout`](marlin_format::layout::ScaleLayout) defines it.
#[cube]
fn channel_scale(column: u32) -> u32 {
    column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2
}
