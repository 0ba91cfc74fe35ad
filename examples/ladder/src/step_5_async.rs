//! Step 5: asynchronous copies, so that a warp multiplies one chunk while the next chunks are being
//! copied.
//!
//! **The step.** `cp.async` copies from global to shared memory without a register in between,
//! asynchronously. Each warp has its own ring of stages. A stage holds the operands of a chunk: 2
//! KiB of words, 64 scales, and the activations of 64 rows of K. While the warp multiplies one
//! stage, the copies of the other stages are in flight.
//!
//! ```text
//! stage 0   multiply chunk 0         | copy chunk 4 ..
//! stage 1   chunk 1 has arrived, or is in flight
//! stage 2   chunk 2 in flight
//! stage 3   copy chunk 3 ..
//! ```
//!
//! Each warp has different rows of K, so no warp reads words that another warp copied. The pipeline
//! needs no barrier of the block, only `cp.async.wait_group` and a `bar.warp.sync`. Activations are
//! read by `ldmatrix`, four 8 x 8 matrices at once, from runs of eight that are swizzled by XOR.
//!
//! **What bounds it.** With few rows, the bound is the number of blocks: the N / 64 blocks are
//! divided unevenly among the multiprocessors. Every block starts with an empty pipeline and ends
//! with a sum over its warps. With many rows, the bound is shared memory: stages grow with the
//! rows, so fewer stages are in flight.
//!
//! **In the profile.** LDGSTS replaces LDG in the loop, and hardly any stall is a "long
//! scoreboard". If N / 64 is a multiple of the multiprocessors, memory throughput is near its
//! limit; otherwise some multiprocessors are idle ("waves per SM").

use crate::fragment::{
    CHUNK, WARPS, reduce_floats, row_tiles, run_place, scales_place, words_place, write,
};
use crate::step_4_tensor_cores::multiply;
use crate::{Args, LadderError};
use cubecl::client::Client;
use cubecl::prelude::*;
use half::f16;
use marlin_kernels::QuantProblem;
use marlin_kernels::ptx::{
    F4, bar_warp_sync, cp_async_16, cp_async_commit_group, cp_async_wait_group, global_address,
    lane, ld_shared_16, ldmatrix_x4, shared_address,
};

/// The number of bytes of a chunk's words, which is also the offset of the scales in a stage.
const WORDS: usize = CHUNK * CHUNK / 2;
/// The offset of the activations of a chunk in a stage.
const ACTIVATIONS: usize = WORDS + CHUNK * 2;
/// The maximum number of stages; more gain little.
const MAX_STAGES: usize = 4;

/// The compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AsyncConfig {
    /// The number of n8 tiles (8 rows of activations) of a block.
    pub tiles: usize,
    /// The number of stages of a warp.
    pub stages: usize,
}

impl AsyncConfig {
    /// Creates a configuration with as many rows as `m` needs and as many stages as fit, or with
    /// fewer rows if two stages do not fit. Returns `None` if two stages of eight rows do not fit.
    pub fn new(m: usize, shared_limit: usize) -> Option<Self> {
        let room = shared_limit.checked_sub(4 * reduce_floats())?;
        let halves = std::iter::successors(Some(row_tiles(m)), |tiles| {
            (*tiles > 1).then_some(tiles / 2)
        });
        let with_stages = |tiles| Self {
            tiles,
            stages: (room / (WARPS * Self { tiles, stages: 0 }.stage_bytes())).min(MAX_STAGES),
        };
        halves.map(with_stages).find(|config| config.stages >= 2)
    }

    /// Returns the number of bytes of a warp's stage.
    const fn stage_bytes(&self) -> usize {
        ACTIVATIONS + 8 * self.tiles * CHUNK * 2
    }
}

// ANCHOR: copy
/// Starts the copies of a lane's part of a chunk. `x`, `words` and `scales` are addresses in global
/// memory.
#[cube]
fn start_copies(
    stage: u32,
    chunk: u32,
    x: u64,
    words: u64,
    scales: u64,
    m: u32,
    n: u32,
    k: u32,
    #[comptime] config: AsyncConfig,
) {
    let lane = lane();
    let chunks_n = n / 64;
    #[unroll]
    for i in 0..4u32 {
        let place = words_place(chunk * 4 + i, CUBE_POS_X, chunks_n, lane);
        cp_async_16(
            stage + comptime!(512 * i) + lane * 16,
            words + u64::cast_from(place) * 16u64,
        );
    }
    if lane < 8 {
        let place = scales_place(chunk / 2, CUBE_POS_X, chunks_n, lane * 4);
        cp_async_16(
            stage + comptime!(WORDS as u32) + lane * 16,
            scales + u64::cast_from(place) * 16u64,
        );
    }
    // Eight lanes copy a row of 128 bytes. Rows past M repeat the last row; their results are not
    // written.
    #[unroll]
    for i in 0..comptime!(2 * config.tiles as u32) {
        let row = comptime!(4 * i) + lane / 8;
        let x_row = min(CUBE_POS_Y * comptime!(8 * config.tiles as u32) + row, m - 1);
        let place = x_row * (k / 8) + chunk * 8 + lane % 8;
        cp_async_16(
            stage + comptime!(ACTIVATIONS as u32) + run_place(row, lane % 8) * 16,
            x + u64::cast_from(place) * 16u64,
        );
    }
}
// ANCHOR_END: copy

// ANCHOR: stage
/// Adds the products of the chunk in a stage to `sums`.
#[cube]
fn multiply_stage(stage: u32, sums: &mut Array<F4>, #[comptime] tiles: usize) {
    let lane = lane();
    let scales = ld_shared_16(stage + comptime!(WORDS as u32) + lane / 4 * 16);
    #[unroll]
    for half in 0..2u32 {
        // Four matrices hold 32 rows of K, which are the fragments B of two products. Lane 8i + r
        // provides the address of row r of matrix i.
        let mut first = Array::<u32>::new(comptime!(2 * tiles));
        let mut second = Array::<u32>::new(comptime!(2 * tiles));
        #[unroll]
        for i in 0..tiles {
            let run = run_place(
                comptime!(8 * i as u32) + lane % 8,
                comptime!(4 * half) + lane / 8,
            );
            let four = ldmatrix_x4(stage + comptime!(ACTIVATIONS as u32) + run * 16);
            first[comptime!(2 * i)] = four.extract(0usize);
            first[comptime!(2 * i + 1)] = four.extract(1usize);
            second[comptime!(2 * i)] = four.extract(2usize);
            second[comptime!(2 * i + 1)] = four.extract(3usize);
        }
        let words = stage + comptime!(1024 * half) + lane * 16;
        multiply(ld_shared_16(words), scales, &first, sums, tiles);
        multiply(ld_shared_16(words + 512), scales, &second, sums, tiles);
    }
}
// ANCHOR_END: stage

// ANCHOR: kernel
/// Multiplies as step 4 does, with operands copied to stages in shared memory.
#[cube(launch_unchecked)]
pub(crate) fn pipelined(
    x: &[f16],
    words: &[u32],
    scales: &[f16],
    out: &mut [f16],
    m: u32,
    n: u32,
    k: u32,
    #[comptime] config: AsyncConfig,
) {
    let stage_bytes = comptime!(config.stage_bytes() as u32);
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!(WARPS * config.stages * config.stage_bytes() / 4),
        128usize,
    );
    let warp = UNIT_POS_X / 32;
    let stages =
        shared_address::<u32>(&memory) + warp * comptime!(config.stages as u32 * stage_bytes);
    let last = stages + comptime!((config.stages as u32 - 1) * stage_bytes);
    let (x, words, scales) = (
        global_address::<f16>(x),
        global_address::<u32>(words),
        global_address::<f16>(scales),
    );
    let chunks = k / 64;
    let mut sums = Array::<F4>::new(comptime!(4 * config.tiles));
    #[unroll]
    for i in 0..comptime!(4 * config.tiles) {
        sums[i] = F4::new(0.0);
    }

    // All stages but one are filled ahead. Each stage commits a group of copies, which is empty
    // past K, so that the number of groups to wait for is always the same.
    let mut chunk = warp;
    #[unroll]
    for i in 0..comptime!(config.stages as u32 - 1) {
        let ahead = chunk + comptime!(i * WARPS as u32);
        if ahead < chunks {
            start_copies(
                stages + comptime!(i * stage_bytes),
                ahead,
                x,
                words,
                scales,
                m,
                n,
                k,
                config,
            );
        }
        cp_async_commit_group();
    }
    let (mut stage, mut free) = (stages, last);
    while chunk < chunks {
        // After the wait, this lane's copies have arrived. After the barrier, the copies of the
        // whole warp have arrived, and the previous stage is free.
        cp_async_wait_group(comptime!(config.stages - 2));
        bar_warp_sync();
        let ahead = chunk + comptime!((config.stages - 1) as u32 * WARPS as u32);
        if ahead < chunks {
            start_copies(free, ahead, x, words, scales, m, n, k, config);
        }
        cp_async_commit_group();
        multiply_stage(stage, &mut sums, comptime!(config.tiles));
        free = stage;
        stage = if stage == last {
            stages
        } else {
            stage + stage_bytes
        };
        chunk += comptime!(WARPS as u32);
    }
    write(&sums, out, m, n, comptime!(config.tiles));
}
// ANCHOR_END: kernel

pub(crate) fn launch(
    client: &Client,
    problem: &QuantProblem,
    args: Args,
) -> Result<(), LadderError> {
    let (m, n, k) = (problem.m, problem.n(), problem.k());
    let shared_limit = client.properties().hardware.max_shared_memory_size;
    let config = AsyncConfig::new(m, shared_limit);
    let config = config.ok_or_else(|| LadderError::Card {
        step: 5,
        problem: problem.to_string(),
        shared_limit,
    })?;
    let count = CubeCount::new_2d((n / 64) as u32, m.div_ceil(8 * config.tiles) as u32);
    let dim = CubeDim::new_1d(32 * WARPS as u32);
    let [m, n, k] = [m, n, k].map(|length| length as u32);
    // SAFETY: the lengths of all buffers were checked, K and N are whole chunks of more than one
    // group, and no row past M is read or written. The stages fit the shared memory of a block.
    unsafe {
        pipelined::launch_unchecked(
            client,
            count,
            dim,
            args.x,
            args.words,
            args.scales,
            args.out,
            m,
            n,
            k,
            config,
        )
    };
    Ok(())
}
