//! The reduction of the warps' sums to the output: sums are added along K within a block, then
//! within the cluster; then they are normalised, the bias is added, and the result is written.

use super::config::{COLUMNS, GemvConfig, GemvSizes, WARPS};
use crate::ptx::{
    cluster_arrive_relaxed, cluster_wait, fence_mbarrier_init, lane, mbarrier_arrive,
    mbarrier_arrive_expect_tx, mbarrier_init, shared_address, st_async_first_block, st_shared_f32,
};
use crate::tile::epilogue::gated;
use crate::tile::fragment::stored_units;
use cubecl::prelude::*;

/// The number of floats of a partial sum along K: one for each column, and the sum of the squares
/// of the row.
pub(super) const PART: usize = COLUMNS + 1;

/// Initialises `barrier`. In the first block of a cluster, it completes when the sums of all blocks
/// have arrived. It counts the bytes that the blocks store or, in a cluster of one block, the
/// threads that have stored a sum.
#[cube]
pub(super) fn expect_sums(barrier: u32, #[comptime] config: GemvConfig) {
    if UNIT_POS_X == 0 {
        if comptime!(config.cluster() > 1) {
            mbarrier_init(barrier, 1usize);
            mbarrier_arrive_expect_tx(
                barrier,
                comptime!((config.cluster() * PART * 4) as u32).runtime(),
            );
        } else {
            mbarrier_init(barrier, PART);
        }
        fence_mbarrier_init();
    }
    // Before threads store sums, they wait for this arrival of the first block.
    cluster_arrive_relaxed();
}

/// Adds the sums of a block's warps, always in the same order, and stores the result in the shared
/// memory of the cluster's first block: `sums` are `[rank, PART]` there, and `barrier` counts their
/// bytes.
#[cube]
pub(super) fn leave_in_first_block(
    totals: &Array<f32>,
    square: f32,
    parts: &mut Shared<[f32]>,
    sums: &Shared<[f32]>,
    barrier: u32,
    rank: u32,
    #[comptime] config: GemvConfig,
) {
    let (low_unit, high_unit) = comptime!(stored_units(&config.products()));
    // All eight rows of the product are the same row, so the four lanes of a column hold the same
    // sums.
    let own = UNIT_POS_X / 32 * comptime!(PART as u32);
    if lane().is_multiple_of(4) {
        #[unroll]
        for j in 0..4usize {
            let column = own + lane() / 4 + comptime!(16 * j as u32);
            parts[column as usize] = totals[j] * low_unit;
            parts[(column + 8) as usize] = totals[comptime!(4 + j)] * high_unit;
        }
    }
    if lane() == 0 {
        parts[(own + comptime!(COLUMNS as u32)) as usize] = square;
    }
    sync_cube();
    // Once this wait returns, the first block has started and initialised its barrier.
    cluster_wait();
    if UNIT_POS_X < comptime!(PART as u32) {
        let mut total = 0.0f32;
        #[unroll]
        for warp in 0..WARPS {
            total += parts[(UNIT_POS_X + comptime!((warp * PART) as u32)) as usize];
        }
        let place = shared_address::<f32>(sums) + (rank * comptime!(PART as u32) + UNIT_POS_X) * 4;
        if comptime!(config.cluster() > 1) {
            st_async_first_block(place, total, barrier);
        } else {
            st_shared_f32(place, total);
            mbarrier_arrive(barrier);
        }
    }
}

/// Adds the sums of the cluster's blocks, always in the same order, and writes the output.
#[cube]
pub(super) fn write<F: Float>(
    sums: &Shared<[f32]>,
    bias: &ComptimeOption<&[F]>,
    out: &mut [F],
    epsilon: f32,
    place: u32,
    sizes: &GemvSizes,
    #[comptime] config: GemvConfig,
) {
    let column = place * comptime!(COLUMNS as u32) + UNIT_POS_X;
    if UNIT_POS_X < comptime!(COLUMNS as u32) && column < sizes.n {
        let mut root = 1.0f32.runtime();
        if comptime!(config.has_norm()) {
            let square = add_parts(sums, comptime!(COLUMNS as u32).runtime(), config);
            root = (square / f32::cast_from(sizes.k) + epsilon).sqrt();
        }
        let mut value = biased::<F>(add_parts(sums, UNIT_POS_X, config) / root, bias, column);
        if comptime!(config.is_gated()) {
            let ups = add_parts(
                sums,
                UNIT_POS_X + comptime!((config.blocks * PART) as u32),
                config,
            );
            value = gated(
                value,
                biased::<F>(ups / root, bias, column + sizes.n),
                config.epilogue,
            );
        }
        out[column as usize] = F::cast_from(value);
    }
}

/// Returns the total of a column with its bias.
#[cube]
pub(super) fn biased<F: Float>(total: f32, bias: &ComptimeOption<&[F]>, column: u32) -> f32 {
    let mut total = total;
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => total += f32::cast_from(bias[column as usize]),
        ComptimeOption::None => {}
    }
    total
}

/// Adds the sums of the blocks that split K, in the order of the blocks.
#[cube]
pub(super) fn add_parts(sums: &Shared<[f32]>, place: u32, #[comptime] config: GemvConfig) -> f32 {
    let mut total = 0.0f32;
    #[unroll]
    for part in 0..config.blocks {
        total += sums[(place + comptime!((part * PART) as u32)) as usize];
    }
    total
}
