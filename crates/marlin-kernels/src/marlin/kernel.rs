use super::config::Config;
use super::copy::{Ahead, Source};
use super::epilogue::finish;
use super::fragment::{multiply, stored_ones};
use super::pipeline::{Filler, Turn, fill_ahead, meet_producer, produce};
use super::stripe::{Place, stripe_start};
use super::warpgroup;
use crate::ptx::{F4, global_address, global_address_mut, map_address, opaque, shared_address};
use cubecl::prelude::*;
use cubecl::std::FastDivmod;

/// Lengths of a problem as the kernel sees them. What follows from the others is computed on the host, divisors as what to multiply with: the
/// first bytes are asked for that much sooner.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Lengths {
    /// Rows of activations.
    pub m: u32,
    /// Output features.
    pub n: u32,
    /// Input features, a multiple of 8.
    pub k: u32,
    /// Columns of chunks of the weight: N / 64, rounded up.
    pub chunks_n: u32,
    /// Rows of chunks of the weight: K / 64, rounded up.
    pub chunks_k: u32,
    /// Divides by the blocks of rows of activations.
    pub by_row_blocks: FastDivmod<u32>,
    /// Steps of K in a tile.
    pub depth: u32,
    /// Divides by the steps of K in a tile.
    pub by_depth: FastDivmod<u32>,
    /// Units of work that every block has.
    pub units_each: u32,
    /// Blocks that have one more.
    pub blocks_with_one_more: u32,
    /// [`LOW_NIBBLES`].
    pub low_nibbles: u32,
    /// [`HIGH_NIBBLES`].
    pub high_nibbles: u32,
}

/// The lowest four bits of both halves of a word. It is a parameter because the compiler would load a constant anew for every word.
pub(super) const LOW_NIBBLES: u32 = 0x000f_000f;
/// The next four bits of both halves.
pub(super) const HIGH_NIBBLES: u32 = 0x00f0_00f0;

/// out = x W + bias, W in [`MarlinLayout`](marlin_format::layout::MarlinLayout) padded to chunks.
///
/// The product is computed transposed: fragment A holds 16 columns of the weight, fragment B eight rows of activations, so a tile of few
/// rows wastes no more than it must.
///
/// The activations come as `x` for `mma.sync`, and as `x_map` for `wgmma`.
#[cube(launch_unchecked)]
pub(super) fn matmul<F: Float>(
    x: ComptimeOption<&[F]>,
    x_map: ComptimeOption<TensorMap<F, Tiled>>,
    words: &[u32],
    scales: &[F],
    zero_points: ComptimeOption<&[u32]>,
    bias: ComptimeOption<&[F]>,
    out: &mut [F],
    workspace: &mut [u64],
    lengths: Lengths,
    #[comptime] config: Config,
    #[define(F)] _dtype: ElemType,
) {
    let shared = Shared::<[u32]>::new_aligned_slice(
        comptime!(config.tile.stages * config.stage_bytes() / 4),
        comptime!(config.alignment().max(128)),
    );
    let mut reduce = Shared::<[f32]>::new_aligned_slice(comptime!(config.reduce_floats()), 128usize);
    let stages = shared_address::<u32>(&shared);
    let mut barriers = 0u32.runtime();
    if comptime!(config.tile.is_wgmma()) {
        let shared = Shared::<[u64]>::new_aligned_slice(comptime!(config.tile.stages * config.barrier_bytes() / 8), 8usize);
        barriers = shared_address::<u64>(&shared);
    }

    let source = Source {
        x: #[comptime]
        match x {
            ComptimeOption::Some(x) => global_address::<F>(x),
            ComptimeOption::None => 0u64.runtime(),
        },
        x_map: #[comptime]
        match x_map {
            ComptimeOption::Some(map) => map_address::<F>(&map),
            ComptimeOption::None => 0u64.runtime(),
        },
        words: global_address::<u32>(words),
        scales: global_address::<F>(scales),
        zeros: #[comptime]
        match zero_points {
            ComptimeOption::Some(zeros) => global_address::<u32>(zeros),
            ComptimeOption::None => 0u64.runtime(),
        },
    };
    let start = stripe_start(&lengths, CUBE_POS_X);
    let end = stripe_start(&lengths, CUBE_POS_X + 1);
    if start == end {
        terminate!();
    }

    let mut turn = Turn::first(stages, barriers, 0u32.runtime());
    let mut here = Place::last(&lengths, start, end);
    let mut ahead = Ahead::new(start, end, &lengths, config);
    let mut filler = Filler::new(Turn::first(stages, barriers, 1u32.runtime()), start, end, &lengths, config);
    let mut warp = UNIT_POS_X / 32;
    if comptime!(config.tile.is_wgmma()) {
        // Lane 0 says it for all: the compiler then knows that a warp stays together, and keeps what its lanes share in uniform registers.
        warp = plane_broadcast(warp, 0u32);
    }
    if comptime!(config.has_producer()) {
        if warp == comptime!(config.tile.warps() as u32) {
            produce(&mut filler, &source, &lengths, config);
            terminate!();
        }
        meet_producer(config);
    } else if comptime!(config.tile.is_wgmma()) {
        fill_ahead(&mut filler, warp, &source, &lengths, config);
    } else {
        ahead.fill(stages, &source, &lengths, config);
    }

    let workspace = global_address_mut::<u64>(workspace);
    if comptime!(config.tile.is_wgmma()) {
        warpgroup::declare(config);
    }
    let mut sums = Array::<F4>::new(comptime!(4 * config.tile.batch_tiles));
    let ones = stored_ones(config);
    let mut to_multiply = end - start;
    while to_multiply > 0 {
        #[unroll]
        for i in 0..comptime!(4 * config.tile.batch_tiles) {
            sums[i] = F4::new(0.0);
        }
        if comptime!(config.tile.is_wgmma()) {
            if comptime!(!config.multiplies_stored()) {
                warpgroup::clear(config);
            }
            turn.agree();
            for step in here.first..here.end {
                if comptime!(!config.has_producer()) {
                    filler.share(warp, &source, &lengths, config);
                }
                warpgroup::multiply(&turn, warp, step, &here, ones, &mut sums, &lengths, config);
                turn.next(config);
            }
            warpgroup::end(&mut sums, config);
        } else {
            let warps_n = comptime!(config.tile.warps_n as u32);
            let column = lengths.by_row_blocks.div(here.tile) * warps_n + warp % warps_n;
            // Opaque, or the compiler computes it anew for every step.
            let chunks = opaque(if column < lengths.chunks_n { lengths.chunks_k } else { 0u32.runtime() });
            let mut chunk = here.first * comptime!(config.tile.warps_k as u32) + warp / warps_n;
            for _ in here.first..here.end {
                ahead.step(turn.stage, stages, &source, &lengths, config);
                // Past N or K there is nothing to multiply.
                if chunk < chunks {
                    multiply(turn.stage, &mut sums, ones, &lengths, config);
                }
                chunk += comptime!(config.tile.warps_k as u32);
                turn.next(config);
            }
        }
        finish::<F>(&sums, &mut reduce, scales, &bias, out, workspace, &here, &lengths, config);
        to_multiply -= here.end - here.first;
        here.step_back(&lengths, start);
    }
}
