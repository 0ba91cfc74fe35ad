//! The attention kernel on `wgmma`, for compute capability 9.0.

use super::config::{FlashConfig, FlashLengths, TileRows};
use super::pipeline::{ATOM_ROW, Memory, STAGES, produce, release};
use super::softmax::{Softmax, exponentials, mask, probabilities, write};
use super::tiles::TILE_ROWS;
use cubecl::prelude::*;
use marlin_kernels::pdl::launch_dependents_and_wait;
use marlin_kernels::ptx::{
    F4, U4, bar_sync, elect_sync, fence_proxy_async, global_address_mut, lane, mbarrier_init,
    mbarrier_wait_parity_warp, setmaxnreg_dec, setmaxnreg_inc, shared_address, st_shared_16,
    tensormap_address, wgmma_b, wgmma_clear, wgmma_commit_group, wgmma_declare,
    wgmma_declare_shared, wgmma_descriptor, wgmma_descriptor_transposed, wgmma_fence, wgmma_more,
    wgmma_scale, wgmma_shared, wgmma_sum, wgmma_transposed, wgmma_wait_group,
};

/// The number of warps that multiply: two warpgroups of 64 rows.
const WARPS: usize = TILE_ROWS / 16;
/// The number of threads of a block: the warps that multiply, and a warpgroup of which one thread
/// copies.
pub(super) const THREADS: usize = 32 * WARPS + 128;
/// The index of the named barrier of the warps that multiply.
const CONSUMERS: usize = 1;
/// The number of registers of a thread of the warpgroup that copies; a thread of the warpgroups
/// that multiply has `CONSUMER_REGISTERS`. The sum over the three warpgroups is three times the 168
/// registers with which each of them starts.
const PRODUCER_REGISTERS: usize = 24;
const CONSUMER_REGISTERS: usize = 240;

impl FlashConfig {
    /// Returns the number of accumulators of a warp's scores, of eight positions each.
    const fn stage_scores(&self) -> usize {
        self.stage_keys() / 8
    }

    /// Returns the first register of the outputs' sums, which follow the registers of the scores.
    const fn first_sum(&self) -> usize {
        4 * self.stage_scores()
    }
}

/// Computes out = softmax(q kᵀ / sqrt(head_dim)) v for one tile and one query head; see the
/// documentation of the module `flash`. The grid is heads by tiles.
#[cube(launch_unchecked)]
pub(super) fn flash_wgmma<F: Float>(
    queries: TensorMap<F, Tiled>,
    keys: TensorMap<F, Tiled>,
    values: TensorMap<F, Tiled>,
    state: &[i32],
    tiles: &[i32],
    pages: ComptimeOption<&[i32]>,
    sinks: ComptimeOption<&[F]>,
    out: &mut [F],
    lengths: FlashLengths,
    #[comptime] config: FlashConfig,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(true);
    let shared = Shared::<[u32]>::new_aligned_slice(comptime!(config.tiles_bytes() / 4), 1024usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(2 + 4 * STAGES), 16usize);
    let tile = TileRows::read(tiles, state, CUBE_POS_Y, &lengths);
    if tile.count == 0 {
        terminate!();
    }
    let start = shared_address::<u32>(&shared);
    let keys_start = start + comptime!((config.atoms() * config.query_atom()) as u32);
    let memory = Memory {
        queries: start,
        keys: keys_start,
        values: keys_start + comptime!((STAGES * config.stage()) as u32),
        barriers: shared_address::<u64>(&barriers),
    };
    let (keys, values) = (
        tensormap_address::<F>(&keys),
        tensormap_address::<F>(&values),
    );
    // The broadcast from lane 0 tells the compiler that the value is uniform in a warp.
    let warp = plane_broadcast(UNIT_POS_X / 32, 0u32);
    if warp == 0 && elect_sync() {
        mbarrier_init(memory.barriers, 1usize);
        #[unroll]
        for stage in 0..comptime!(2 * STAGES as u32) {
            mbarrier_init(memory.keys_full(stage), 1usize);
            mbarrier_init(memory.keys_full(stage) + 8, WARPS);
        }
        fence_proxy_async();
    }
    sync_cube();
    if warp >= comptime!(WARPS as u32) {
        setmaxnreg_dec(PRODUCER_REGISTERS);
        if warp == comptime!(WARPS as u32) && elect_sync() {
            produce(
                tensormap_address::<F>(&queries),
                keys,
                values,
                &pages,
                &tile,
                &memory,
                &lengths,
                config,
            );
        }
        terminate!();
    }
    setmaxnreg_inc(CONSUMER_REGISTERS);
    wgmma_declare(comptime!(config.first_sum() + config.head_dim / 2));
    wgmma_declare_shared();
    wgmma_more(0u32.runtime());
    #[unroll]
    for i in 0..comptime!(config.head_dim / 2) {
        wgmma_clear(comptime!(config.first_sum() + i));
    }

    let warp_row = warp * 16;
    let query_rows = wgmma_descriptor(plane_broadcast(
        memory.queries + warp / 4 * comptime!(TILE_ROWS as u32 / 2 * ATOM_ROW as u32),
        0u32,
    ));
    let end = tile.end();
    let mut first = tile.first_key(&lengths, comptime!(config.stage_keys() as u32));
    let mut softmax = Softmax::new();
    let mut scores = Array::<F4>::new(comptime!(config.stage_scores()));
    let mut exponents = Array::<U4>::new(comptime!(config.stage_keys() / 16));

    // The number of stages before the current one. Bit 0 is the stage, and bit 1 is the parity of
    // the stage's barriers.
    let mut number = 0u32.runtime();
    mbarrier_wait_parity_warp(memory.barriers, 0u32.runtime());
    mbarrier_wait_parity_warp(memory.keys_full(0u32.runtime()), 0u32.runtime());
    multiply_keys(query_rows, memory.keys, config);
    wgmma_wait_group(0usize);
    release(memory.keys_full(0u32.runtime()));
    let _factors = take_scores(
        &mut scores,
        &mut softmax,
        &tile,
        warp_row,
        first,
        &lengths,
        config,
    );
    round(&scores, &mut exponents, config);
    first += comptime!(config.stage_keys() as u32);

    while first < end {
        let (stage, parity) = (number % 2, number / 2 % 2);
        let next = number + 1;
        let (next_stage, next_parity) = (next % 2, next / 2 % 2);
        // The products of the next keys are issued before those of the current values, so that the
        // softmax of the next scores overlaps with the products of the values.
        mbarrier_wait_parity_warp(memory.keys_full(next_stage), next_parity);
        multiply_keys(
            query_rows,
            memory.keys + next_stage * comptime!(config.stage() as u32),
            config,
        );
        mbarrier_wait_parity_warp(memory.values_full(stage), parity);
        multiply_values(
            &exponents,
            memory.values + stage * comptime!(config.stage() as u32),
            config,
        );
        wgmma_wait_group(1usize);
        release(memory.keys_full(next_stage));
        let factors = take_scores(
            &mut scores,
            &mut softmax,
            &tile,
            warp_row,
            first,
            &lengths,
            config,
        );
        wgmma_wait_group(0usize);
        release(memory.values_full(stage));
        #[unroll]
        for i in 0..comptime!(config.head_dim / 2) {
            wgmma_scale(
                comptime!(config.first_sum() + i),
                factors.extract(comptime!(i % 4)),
            );
        }
        round(&scores, &mut exponents, config);
        first += comptime!(config.stage_keys() as u32);
        number = next;
    }

    let stage = memory.values + number % 2 * comptime!(config.stage() as u32);
    mbarrier_wait_parity_warp(memory.values_full(number % 2), number / 2 % 2);
    clear_past(
        stage,
        end + comptime!(config.stage_keys() as u32) - first,
        config,
    );
    multiply_values(&exponents, stage, config);
    wgmma_wait_group(0usize);
    let mut sums = Array::<F4>::new(comptime!(config.head_dim / 8));
    read(
        &mut sums,
        comptime!(config.first_sum()),
        comptime!(config.head_dim / 8),
    );
    let stride = lengths.heads * comptime!(config.head_bytes() as u32);
    let out = global_address_mut::<F>(out)
        + u64::cast_from(tile.first) * u64::cast_from(stride)
        + u64::cast_from(CUBE_POS_X * comptime!(config.head_bytes() as u32));
    write(
        &sums, &softmax, &sinks, out, warp_row, tile.count, stride, config,
    );
}

/// Starts the products of a warpgroup's queries with a stage of keys.
#[cube]
fn multiply_keys(queries: u32, keys: u32, #[comptime] config: FlashConfig) {
    let keys = wgmma_descriptor(plane_broadcast(keys, 0u32));
    wgmma_fence();
    #[unroll]
    for step in 0..comptime!(config.steps()) {
        // 16 features are 32 bytes, two of the descriptor's units.
        let (atom, in_atom) = comptime!(((step / 4) as u32, (step % 4 * 2) as u32));
        let a = queries + comptime!(atom * (config.query_atom() / 16) as u32 + in_atom);
        wgmma_b(keys + comptime!(atom * (config.key_atom() / 16) as u32 + in_atom));
        wgmma_shared(
            a,
            0usize,
            comptime!(config.stage_keys()),
            comptime!(step == 0),
            config.bf16,
        );
    }
    wgmma_commit_group();
}

/// Starts the products of the exponentials with a stage of values.
#[cube]
fn multiply_values(exponents: &Array<U4>, values: u32, #[comptime] config: FlashConfig) {
    let values =
        wgmma_descriptor_transposed(plane_broadcast(values, 0u32), comptime!(config.key_atom()));
    wgmma_fence();
    #[unroll]
    for step in 0..comptime!(config.stage_keys() / 16) {
        wgmma_b(values + comptime!((step * 16 * ATOM_ROW / 16) as u32));
        wgmma_transposed(
            exponents[step],
            comptime!(config.first_sum()),
            config.head_dim,
            config.bf16,
        );
    }
    wgmma_commit_group();
}

/// Reads the scores of the stage at position `first`, masks them, and replaces them by their
/// exponentials. Returns the factors by which the caller multiplies the sums so far.
#[cube]
fn take_scores(
    scores: &mut Array<F4>,
    softmax: &mut Softmax,
    tile: &TileRows,
    warp_row: u32,
    first: u32,
    lengths: &FlashLengths,
    #[comptime] config: FlashConfig,
) -> F4 {
    read(scores, 0usize, comptime!(config.stage_scores()));
    // Scores are masked only at the diagonal and at the start of the window.
    let row = tile.position + warp_row;
    if first + comptime!(config.stage_keys() as u32) > row + 1 || row + 15 - first >= lengths.window
    {
        mask(
            scores,
            row + lane() / 4,
            first + lane() % 4 * 2,
            lengths.window,
            comptime!(config.stage_scores()),
        );
    }
    exponentials(scores, softmax, comptime!(config.stage_scores()), config)
}

/// Reads `count` accumulators, starting at register `first`.
#[cube]
fn read(four: &mut Array<F4>, #[comptime] first: usize, #[comptime] count: usize) {
    #[unroll]
    for i in 0..count {
        let mut values = F4::new(0.0);
        #[unroll]
        for element in 0..4usize {
            values.insert(element, wgmma_sum(comptime!(first + 4 * i + element)));
        }
        four[i] = values;
    }
}

/// Rounds the exponentials to fragments A.
#[cube]
fn round(scores: &Array<F4>, exponents: &mut Array<U4>, #[comptime] config: FlashConfig) {
    #[unroll]
    for step in 0..comptime!(config.stage_keys() / 16) {
        exponents[step] = probabilities(scores, step, config);
    }
}

/// Clears the rows of a stage from `rows` on. The cache may contain any values there, and 0 times
/// NaN is NaN.
#[cube]
fn clear_past(stage: u32, rows: u32, #[comptime] config: FlashConfig) {
    if rows < comptime!(config.stage_keys() as u32) {
        let mut vector = rows * comptime!(ATOM_ROW as u32 / 16) + UNIT_POS_X;
        while vector < comptime!((config.key_atom() / 16) as u32) {
            #[unroll]
            for atom in 0..comptime!(config.atoms() as u32) {
                st_shared_16(
                    stage + comptime!(atom * config.key_atom() as u32) + vector * 16,
                    U4::new(0u32),
                );
            }
            vector += comptime!(32 * WARPS as u32);
        }
        fence_proxy_async();
    }
    bar_sync(CONSUMERS, comptime!(32 * WARPS));
}
