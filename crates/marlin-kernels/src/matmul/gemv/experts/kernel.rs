use super::super::config::{GemvSizes, THREADS, WARPS};
use super::super::groups_of_16;
use super::super::kernel::multiply;
use super::super::output::{PART, expect_sums, leave_in_first_block};
use super::super::weight::{WeightAddresses, WeightLoads};
use super::config::ExpertGemvConfig;
use super::logits::load_logits;
use super::output::{write_row, write_sum};
use crate::ActivationDtype;
use crate::experts::route::choose::{choose, choose_rank, values_of_lane};
use crate::pdl::{launch_dependents, wait};
use crate::ptx::{bar_warp_sync, lane, mbarrier_wait_first_phase_cluster, opaque, shared_address};
use crate::tile::fragment::stored_ones;
use cubecl::prelude::*;
use marlin_format::GroupSize;

/// Computes the products of tokens' rows and their experts' matrices, or the weighted sums of
/// those of each token: see [`ExpertRows`](super::ExpertRows).
///
/// The matrices are those of [`gemv`](super::super::kernel::gemv), one below the other. With
/// gathered rows a cluster computes 64 columns of one row (64 gates and their ups), with summed
/// rows 64 columns of all experts of a token, whose blocks follow each other. Every warp chooses
/// the token's experts by itself.
#[cube(launch_unchecked, cluster_dim = config.gemv.cluster_dim())]
pub(super) fn expert_gemv<F: Float, N: Size, L: Float>(
    x: &[Vector<F, N>],
    logits: &[L],
    correction: ComptimeOption<&[f32]>,
    factor: f32,
    qweight: &[u32],
    scales: &[F],
    zero_points: ComptimeOption<&[u32]>,
    bias: ComptimeOption<&[F]>,
    out: &mut [F],
    sizes: GemvSizes,
    #[comptime] config: ExpertGemvConfig,
    #[define(F)] _dtype: ElemType,
    #[define(L)] _logits_dtype: ElemType,
) {
    let gemv = comptime!(config.gemv);
    let mut staged = Shared::<[Vector<F, N>]>::new_aligned_slice(THREADS, 128usize);
    let mut parts = Shared::<[f32]>::new_slice(comptime!(WARPS * PART));
    let sums = Shared::<[f32]>::new_slice(comptime!(gemv.cluster() * PART));
    let barrier = Shared::<[u64]>::new_aligned_slice(1usize, 8usize);
    let barrier = shared_address::<u64>(&barrier);
    expect_sums(barrier, gemv);
    let zeros = groups_of_16::zeros(gemv);

    let (cluster, blocks, top_k) = comptime!((
        gemv.cluster() as u32,
        gemv.blocks as u32,
        config.router.top_k as u32
    ));
    let (place, rank) = (CUBE_POS_X / cluster, CUBE_POS_X % cluster);
    // The output's row and tile of columns.
    let tiles = sizes.tiles_n / comptime!(gemv.epilogue.columns() as u32);
    let (row, tile) = (place / tiles, place % tiles);
    let (token, choice) = if comptime!(config.is_summed()) {
        (row, rank / blocks)
    } else {
        (row / top_k, row % top_k)
    };
    let tile_n = if comptime!(gemv.is_gated()) {
        tile + rank / blocks * tiles
    } else {
        tile
    };

    // The logits are complete before a kernel with summed rows starts, because the kernel before it
    // has gathered rows: it waits for the logits before it lets the next kernel start.
    if comptime!(config.is_summed()) {
        launch_dependents(true);
    } else {
        wait(true);
        launch_dependents(true);
    }
    let mut values = Array::<f32>::new(comptime!(values_of_lane(&config.router)));
    load_logits::<L>(logits, token, &mut values, config);
    let halves = comptime!(config.logits != ActivationDtype::F32);
    let (experts, weights, expert) = if comptime!(config.is_summed()) {
        let (experts, weights) = choose(
            &mut values,
            &correction,
            lane(),
            factor,
            config.router,
            halves,
        );
        (experts, weights, plane_shuffle(experts, choice))
    } else {
        let expert = choose_rank(
            &mut values,
            &correction,
            lane(),
            choice,
            config.router,
            halves,
        );
        (expert, 1.0f32.runtime(), expert)
    };

    let steps = sizes.tiles_k.div_ceil(comptime!(gemv.tiles() as u32));
    let part = rank % blocks;
    let end = steps * (part + 1) / blocks;
    let mut step = steps * part / blocks + UNIT_POS_X / 32;
    let weight =
        WeightAddresses::of_expert::<F>(qweight, scales, zero_points, tile_n, expert, &sizes, gemv);
    let mut loads = WeightLoads::new(gemv);
    if step < end {
        loads.load_step(&weight, step, &sizes, gemv);
    }
    let input = if comptime!(config.is_summed()) {
        wait(true);
        token * top_k + choice
    } else {
        token
    };
    let vectors = sizes.k / comptime!(gemv.lane_values() as u32);
    let mut values = load_input::<F, N>(x, input, vectors, step);
    // Lane 8i + r gives the address of row r of matrix i of ldmatrix.x4; all eight rows are the
    // same.
    let matrices = shared_address::<Vector<F, N>>(&staged)
        + UNIT_POS_X / 32 * comptime!(2 * gemv.step_k() as u32)
        + lane() / 8 * 16;

    let mut totals = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        totals[i] = 0.0;
    }
    let ones = stored_ones(false, comptime!(gemv.products()));
    while step < end {
        let next = step + comptime!(WARPS as u32);
        let more = next < end;
        staged[UNIT_POS_X as usize] = values;
        values = load_input::<F, N>(x, input, vectors, next);
        loads.set_step(&weight, next, &sizes, gemv);
        bar_warp_sync();
        multiply(
            &mut loads,
            &weight,
            matrices,
            zeros,
            &mut totals,
            1.0,
            next,
            more,
            ones,
            &sizes,
            gemv,
        );
        // All lanes must have read the input of this step before the next input replaces it.
        bar_warp_sync();
        step = next;
    }

    if comptime!(gemv.group == GroupSize::G16) {
        groups_of_16::add_lanes(&mut totals);
    }
    leave_in_first_block(&totals, 0.0, &mut parts, &sums, barrier, rank, gemv);
    if rank == 0 {
        mbarrier_wait_first_phase_cluster(barrier);
        // Computed again, so that they take no registers in the loop.
        let place = opaque(CUBE_POS_X) / cluster;
        let (row, tile) = (place / tiles, place % tiles);
        if comptime!(config.is_summed()) {
            write_sum::<F>(
                &sums, &bias, out, experts, weights, row, tile, &sizes, config,
            );
        } else {
            write_row::<F>(&sums, &bias, out, expert, row, tile, &sizes, config);
        }
    }
}

/// Loads a lane's values of a step of a row of `vectors` vectors; zeros beyond K.
#[cube]
fn load_input<F: Float, N: Size>(
    x: &[Vector<F, N>],
    row: u32,
    vectors: u32,
    step: u32,
) -> Vector<F, N> {
    let place = step * 32 + lane();
    let zero = Vector::<F, N>::new(F::from_int(0));
    if place < vectors {
        x[(row * vectors + place) as usize]
    } else {
        zero
    }
}
