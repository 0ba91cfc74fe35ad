use super::config::{GemvConfig, GemvSizes, THREADS, WARPS};
use super::input::{RawInput, stage};
use super::output::{PART, expect_sums, leave_in_first_block, write};
use super::weight::{WeightAddresses, WeightLoads};
use super::{groups, groups_of_16};
use crate::pdl::{launch_dependents, wait};
use crate::ptx::{U4, bar_warp_sync, lane, mbarrier_wait_first_phase_cluster, shared_address};
use crate::tile::fragment::stored_ones;
use cubecl::prelude::*;
use marlin_format::GroupSize;

/// Computes sum = x + residual and out = norm(sum) W + bias, or without a norm out = x W + bias. W
/// is in [`MarlinLayout`](marlin_format::layout::MarlinLayout), or in
/// [`SparseLayout`](marlin_format::layout::SparseLayout) if it is 2:4, padded to chunks.
///
/// A cluster computes 64 columns. Each of its blocks has a part of K, and a block's warps take the
/// steps of this part in turn. With SwiGLU a cluster computes 64 gates and their ups, with the same
/// number of blocks for each. The product is computed transposed, as in the kernels for many rows:
/// fragment A holds 16 columns of the weight, and all eight rows of fragment B hold the one input
/// row.
#[cube(launch_unchecked, cluster_dim = config.cluster_dim())]
pub(super) fn gemv<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: ComptimeOption<&[Vector<F, N>]>,
    norm: ComptimeOption<&[Vector<F, N>]>,
    mut sum: ComptimeOption<&mut [Vector<F, N>]>,
    qweight: &[u32],
    metadata: ComptimeOption<&[u32]>,
    scales: &[F],
    zero_points: ComptimeOption<&[u32]>,
    bias: ComptimeOption<&[F]>,
    out: &mut [F],
    epsilon: f32,
    sizes: GemvSizes,
    #[comptime] config: GemvConfig,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents(true);
    let mut staged = Shared::<[Vector<F, N>]>::new_aligned_slice(THREADS, 128usize);
    let mut parts = Shared::<[f32]>::new_slice(comptime!(WARPS * PART));
    let sums = Shared::<[f32]>::new_slice(comptime!(config.cluster() * PART));
    let barrier = Shared::<[u64]>::new_aligned_slice(1usize, 8usize);
    let barrier = shared_address::<u64>(&barrier);
    expect_sums(barrier, config);
    let zeros = groups_of_16::zeros(config);

    let blocks = comptime!(config.blocks as u32);
    let (place, rank) = (
        CUBE_POS_X / comptime!(config.cluster() as u32),
        CUBE_POS_X % comptime!(config.cluster() as u32),
    );
    let part = rank % blocks;
    let tile_n = if comptime!(config.is_gated()) {
        place + rank / blocks * (sizes.tiles_n / 2)
    } else {
        place
    };
    let steps = sizes.tiles_k.div_ceil(comptime!(config.tiles() as u32));
    let end = steps * (part + 1) / blocks;
    let mut step = steps * part / blocks + UNIT_POS_X / 32;

    let weight = WeightAddresses::new::<F>(qweight, metadata, scales, zero_points, tile_n, &sizes);
    let mut loads = WeightLoads::new(config);
    if step < end {
        loads.load_step(&weight, step, &sizes, config);
    }
    // Until the preceding kernels have ended, only the weight may be read.
    wait(true);
    let mut raw = RawInput::<F, N>::new();
    raw.load(x, &residual, &norm, step, &sizes, config);
    // Lane 8i + r gives the address of row r of matrix i of ldmatrix.x4; all eight rows are the
    // same.
    let matrices = shared_address::<Vector<F, N>>(&staged)
        + UNIT_POS_X / 32 * comptime!(2 * config.step_k() as u32)
        + lane() / 8 * 16;

    let mut square = 0.0f32;
    // The odd elements of an accumulator repeat the even ones. Totals j and 4 + j belong to columns
    // 16j + lane / 4 and 16j + lane / 4 + 8.
    let mut totals = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        totals[i] = 0.0;
    }
    let ones = stored_ones(false, comptime!(config.products()));
    // A warp loads its next step while the registers of this step become free, so that the number
    // of bytes in flight stays constant.
    while step < end {
        let next = step + comptime!(WARPS as u32);
        let more = next < end;
        let (root, step_square) = stage::<F, N>(
            &raw,
            &mut sum,
            &mut staged,
            step,
            tile_n == 0,
            &sizes,
            config,
        );
        square += step_square;
        raw.load(x, &residual, &norm, next, &sizes, config);
        loads.set_step(&weight, next, &sizes, config);
        bar_warp_sync();
        multiply(
            &mut loads,
            &weight,
            matrices,
            zeros,
            &mut totals,
            root,
            next,
            more,
            ones,
            &sizes,
            config,
        );
        // All lanes must have read the input of this step before the next input replaces it.
        bar_warp_sync();
        step = next;
    }

    if comptime!(config.group == GroupSize::G16) {
        groups_of_16::add_lanes(&mut totals);
    }
    leave_in_first_block(&totals, square, &mut parts, &sums, barrier, rank, config);
    if rank == 0 {
        mbarrier_wait_first_phase_cluster(barrier);
        write::<F>(&sums, &bias, out, epsilon, place, &sizes, config);
    }
}

/// Adds the products of a step to a lane's `totals`, and loads the next step.
#[cube]
pub(super) fn multiply(
    loads: &mut WeightLoads,
    weight: &WeightAddresses,
    matrices: u32,
    zeros: u32,
    totals: &mut Array<f32>,
    root: f32,
    next: u32,
    more: bool,
    ones: U4,
    sizes: &GemvSizes,
    #[comptime] config: GemvConfig,
) {
    if comptime!(config.group == GroupSize::G16) {
        groups_of_16::multiply(
            loads, weight, matrices, zeros, totals, root, next, more, sizes, config,
        );
    } else {
        groups::multiply(
            loads, weight, matrices, totals, root, next, more, ones, sizes, config,
        );
    }
}
