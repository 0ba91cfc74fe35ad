use super::config::Config;
use super::copy::{Copies, Source};
use super::epilogue::finish;
use super::fragment::multiply;
use super::stripe::{Place, stripe_start};
use super::warpgroup;
use crate::ptx::{F4, copy_async_commit, copy_async_wait, fence_proxy_async, global_address, global_address_mut, opaque, shared_address};
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
#[cube(launch_unchecked)]
pub(super) fn matmul<F: Float>(
    x: &[F],
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
    let stage_bytes = comptime!(config.stage_bytes() as u32);
    let last_stage = stages + comptime!(((config.tile.stages - 1) * config.stage_bytes()) as u32);

    let source = Source {
        x: global_address::<F>(x),
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

    let activations = if comptime!(config.tile.is_wgmma()) {
        warpgroup::declare(config);
        warpgroup::activations(config)
    } else {
        0u32.runtime()
    };
    // Copies run `stages_ahead` steps ahead of products.
    let mut here = Place::last(&lengths, start, end);
    let mut ahead = Place::last(&lengths, start, end);
    let mut copies = Copies::new(&lengths, config);
    copies.enter(ahead.tile, ahead.first, &source, &lengths, config);
    let mut to_copy = end - start;
    let mut to_multiply = end - start;
    let mut free_stage = stages;
    // A loop that the compiler cannot unroll: less code to fetch before the first copy.
    while free_stage != stages + comptime!((config.tile.stages_ahead() * config.stage_bytes()) as u32) {
        if to_copy > 0 {
            copy_step(&mut copies, &mut ahead, &mut to_copy, start, &source, &lengths, free_stage, config);
        }
        free_stage = opaque(free_stage + stage_bytes);
        copy_async_commit();
    }

    let workspace = global_address_mut::<u64>(workspace);
    let mut sums = Array::<F4>::new(comptime!(4 * config.tile.batch_tiles));
    let mut stage = stages;
    while to_multiply > 0 {
        if comptime!(config.tile.is_wgmma()) {
            warpgroup::clear(config);
        } else {
            #[unroll]
            for i in 0..comptime!(4 * config.tile.batch_tiles) {
                sums[i] = F4::new(0.0);
            }
        }
        let warp = UNIT_POS_X / 32;
        let warps_n = comptime!(config.tile.warps_n as u32);
        let column = lengths.by_row_blocks.div(here.tile) * warps_n + warp % warps_n;
        // Opaque, or the compiler computes it anew for every step.
        let chunks = opaque(if column < lengths.chunks_n { lengths.chunks_k } else { 0u32.runtime() });
        let mut chunk = here.first * comptime!(config.tile.warps_k as u32) + warp / warps_n;
        for _ in here.first..here.end {
            // This step has arrived, and every warp is done with the stage that is filled next.
            copy_async_wait(comptime!(config.tile.stages_ahead() - 1));
            if comptime!(config.tile.is_wgmma()) {
                fence_proxy_async();
            }
            sync_cube();
            if to_copy > 0 {
                let free_stage = next_free(stage, stages, config);
                copy_step(&mut copies, &mut ahead, &mut to_copy, start, &source, &lengths, free_stage, config);
            }
            copy_async_commit();
            if comptime!(config.tile.is_wgmma()) {
                warpgroup::multiply(stage, activations, &lengths, config);
            } else if chunk < chunks {
                // Past N or K there is nothing to multiply.
                multiply(stage, &mut sums, &lengths, config);
            }
            chunk += comptime!(config.tile.warps_k as u32);
            stage = if stage == last_stage { stages } else { stage + stage_bytes };
        }
        if comptime!(config.tile.is_wgmma()) {
            warpgroup::end(&mut sums, config);
        }
        finish::<F>(&sums, &mut reduce, scales, &bias, out, workspace, &here, &lengths, config);
        to_multiply -= here.end - here.first;
        here.step_back(&lengths, start);
    }
}

/// The stage that no warp uses any more, and that is filled next.
#[cube]
fn next_free(stage: u32, stages: u32, #[comptime] config: Config) -> u32 {
    let back = comptime!((config.tile.stages_in_use() * config.stage_bytes()) as u32);
    let ahead = comptime!((config.tile.stages_ahead() * config.stage_bytes()) as u32);
    let wraps = if comptime!(config.tile.stages_in_use() == 1) { stage == stages } else { stage < stages + back };
    if wraps { stage + ahead } else { stage - back }
}

/// Starts the copies of one step of a stripe, and goes to the next.
#[cube]
fn copy_step(
    copies: &mut Copies,
    ahead: &mut Place,
    to_copy: &mut u32,
    start: u32,
    source: &Source,
    lengths: &Lengths,
    stage: u32,
    #[comptime] config: Config,
) {
    copies.start(lengths, stage, config);
    *to_copy -= 1;
    ahead.first += 1;
    if ahead.first == ahead.end {
        ahead.step_back(lengths, start);
        copies.enter(ahead.tile, ahead.first, source, lengths, config);
    }
}
