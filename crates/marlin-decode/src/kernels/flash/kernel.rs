//! The kernel.

use super::tiles::{TILE_ROWS, TILE_WORDS};
use crate::kernels::Row;
use crate::kernels::attention::{MASKED, NONE};
use cubecl::prelude::*;
use marlin_kernels::ptx::{
    F4, U4, cp_async_16_or_zero, cp_async_commit_group, cp_async_wait_group, cvt_halves, ex2_approx, global_address, global_address_mut,
    lane, ldmatrix_x4, ldmatrix_x4_trans, mma_m16n8k16, shared_address, st_global_4,
};

/// Positions of keys and values that a block has in shared memory at a time.
const KEYS: usize = 64;
/// Threads of a block: a warp for every 16 rows of a tile.
pub(super) const THREADS: usize = 2 * TILE_ROWS;
/// Accumulators of a warp's scores, of eight positions each.
const SCORES: usize = KEYS / 8;

/// The compile-time parameters of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlashConfig {
    /// Features of a head, a multiple of 16.
    pub head_dim: usize,
    /// True for bf16; otherwise f16.
    pub bf16: bool,
}

impl FlashConfig {
    /// Bytes of a head.
    const fn head_bytes(&self) -> usize {
        2 * self.head_dim
    }

    /// Bytes between rows in shared memory.
    const fn row_bytes(&self) -> usize {
        self.head_bytes() + 16
    }

    /// Bytes of shared memory of the queries, and of the keys or the values at a time.
    const fn tile_bytes(&self) -> usize {
        KEYS * self.row_bytes()
    }

    /// Steps of 16 features.
    const fn steps(&self) -> usize {
        self.head_dim / 16
    }

    /// Returns true if a warp keeps its queries in registers; otherwise it loads them for every product.
    const fn holds_queries(&self) -> bool {
        self.head_dim <= 64
    }

    /// The factor of scores before their exponential to the base 2: log2(e) / sqrt(head_dim).
    fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.head_dim as f32).sqrt()
    }
}

/// Lengths of a problem as the kernel sees them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct FlashLengths {
    pub heads: u32,
    pub kv_heads: u32,
    /// Query heads of a key head.
    pub group: u32,
    pub slots: u32,
    pub max_len: u32,
    /// Positions of the sliding window; `u32::MAX` without one.
    pub window: u32,
}

/// The running state of a warp's softmax, for the lane's two rows of 16.
#[derive(CubeType)]
struct Softmax {
    /// The largest score of each.
    best: Array<f32>,
    /// The lane's part of the sum of the exponentials.
    total: Array<f32>,
}

/// out = softmax(q kᵀ / sqrt(head_dim)) v for one tile and one query head: see the module. The grid is heads by tiles.
#[cube(launch_unchecked)]
pub(super) fn flash<F: Float>(
    queries: &[F],
    state: &[i32],
    tiles: &[i32],
    keys: &[F],
    values: &[F],
    out: &mut [F],
    lengths: FlashLengths,
    #[comptime] config: FlashConfig,
    #[define(F)] _dtype: ElemType,
) {
    let tile = CUBE_POS_Y * comptime!(TILE_WORDS as u32);
    let first_row = u32::cast_from(tiles[tile as usize]);
    let rows = u32::cast_from(tiles[tile as usize + 1]);
    if rows == 0 {
        terminate!();
    }
    let words = first_row * comptime!(Row::WORDS as u32);
    let position = state[(words + comptime!(Row::POSITION as u32)) as usize];
    let slot = u32::cast_from(state[(words + comptime!(Row::SLOT as u32)) as usize]);
    if position < 0 || u32::cast_from(position) + rows > lengths.max_len || slot >= lengths.slots {
        terminate!();
    }
    let position = u32::cast_from(position);

    let (head_bytes, row_bytes, steps) = comptime!((config.head_bytes() as u32, config.row_bytes() as u32, config.steps()));
    let tile_bytes = comptime!(config.tile_bytes() as u32);
    let shared = Shared::<[u32]>::new_aligned_slice(comptime!(3 * config.tile_bytes() / 4), 16usize);
    let query_tile = shared_address::<u32>(&shared);
    let (key_tile, value_tile) = (query_tile + tile_bytes, query_tile + 2 * tile_bytes);
    let head = CUBE_POS_X;
    let q_stride = lengths.heads * head_bytes;
    let q = global_address::<F>(queries) + u64::cast_from(first_row) * u64::cast_from(q_stride) + u64::cast_from(head * head_bytes);
    let cache_head = u64::cast_from(slot * lengths.kv_heads + head / lengths.group) * u64::cast_from(lengths.max_len * head_bytes);
    let (keys, values) = (global_address::<F>(keys) + cache_head, global_address::<F>(values) + cache_head);

    // The positions that any row of the tile attends to, from the start of a tile of keys on.
    let end = position + rows;
    let mut first = (position - min(position, lengths.window - 1)) / comptime!(KEYS as u32) * comptime!(KEYS as u32);
    copy_rows(query_tile, q, q_stride, rows, config);
    copy_rows(key_tile, keys + u64::cast_from(first * head_bytes), head_bytes, end - first, config);
    cp_async_commit_group();
    copy_rows(value_tile, values + u64::cast_from(first * head_bytes), head_bytes, end - first, config);
    cp_async_commit_group();

    // Where a lane's rows of the matrices lie that `ldmatrix` reads: of fragments A, and of fragments B that are transposed, the second matrix has rows 8 to
    // 15; of fragments B that are not, features 8 to 15.
    let lane = lane();
    let (by_rows, by_features) = (lane % 16 * row_bytes + lane / 16 * 16, (lane / 16 * 8 + lane % 8) * row_bytes + lane / 8 % 2 * 16);
    let warp_row = UNIT_POS_X / 32 * 16;
    let warp_queries = query_tile + warp_row * row_bytes + by_rows;
    // The positions of the lane's first row; its second is eight further.
    let own = position + warp_row + lane / 4;

    let mut q_held = Array::<U4>::new(comptime!(if config.holds_queries() { config.steps() } else { 1 }));
    let mut sums = Array::<F4>::new(comptime!(config.head_dim / 8));
    #[unroll]
    for i in 0..comptime!(config.head_dim / 8) {
        sums[i] = F4::new(0.0);
    }
    let mut softmax = Softmax { best: Array::<f32>::new(2usize), total: Array::<f32>::new(2usize) };
    #[unroll]
    for row in 0..2usize {
        softmax.best[row] = NONE;
        softmax.total[row] = 0.0;
    }
    if comptime!(config.holds_queries()) {
        cp_async_wait_group(1usize);
        sync_cube();
        #[unroll]
        for step in 0..steps {
            q_held[step] = ldmatrix_x4(warp_queries + comptime!(32 * step as u32));
        }
    }
    while first < end {
        let next = first + comptime!(KEYS as u32);
        cp_async_wait_group(1usize);
        sync_cube();
        let mut scores = Array::<F4>::new(SCORES);
        #[unroll]
        for i in 0..SCORES {
            scores[i] = F4::new(0.0);
        }
        #[unroll]
        for step in 0..steps {
            let a = if comptime!(config.holds_queries()) { q_held[step] } else { ldmatrix_x4(warp_queries + comptime!(32 * step as u32)) };
            #[unroll]
            for pair in 0..comptime!(SCORES / 2) {
                let b = ldmatrix_x4(key_tile + by_features + comptime!((16 * pair) as u32 * row_bytes + 32 * step as u32));
                let (left, right) = comptime!((2 * pair, 2 * pair + 1));
                scores[left] = mma_m16n8k16(a, b.extract(0usize), b.extract(1usize), scores[left], config.bf16);
                scores[right] = mma_m16n8k16(a, b.extract(2usize), b.extract(3usize), scores[right], config.bf16);
            }
        }
        sync_cube();
        if next < end {
            copy_rows(key_tile, keys + u64::cast_from(next * head_bytes), head_bytes, end - next, config);
        }
        cp_async_commit_group();

        // Only at the diagonal and at the start of the window.
        let last = position + warp_row + 15;
        if next > position + warp_row + 1 || last - first >= lengths.window {
            mask(&mut scores, own, first + lane % 4 * 2, lengths.window);
        }
        exponentials(&mut scores, &mut sums, &mut softmax, config);

        cp_async_wait_group(1usize);
        sync_cube();
        #[unroll]
        for step in 0..comptime!(KEYS / 16) {
            let a = probabilities(&scores, step, config);
            #[unroll]
            for pair in 0..comptime!(config.head_dim / 16) {
                let b = ldmatrix_x4_trans(value_tile + by_rows + comptime!((16 * step) as u32 * row_bytes + 32 * pair as u32));
                let (left, right) = comptime!((2 * pair, 2 * pair + 1));
                sums[left] = mma_m16n8k16(a, b.extract(0usize), b.extract(1usize), sums[left], config.bf16);
                sums[right] = mma_m16n8k16(a, b.extract(2usize), b.extract(3usize), sums[right], config.bf16);
            }
        }
        sync_cube();
        if next < end {
            copy_rows(value_tile, values + u64::cast_from(next * head_bytes), head_bytes, end - next, config);
        }
        cp_async_commit_group();
        first = next;
    }

    let out = global_address_mut::<F>(out)
        + u64::cast_from(first_row) * u64::cast_from(q_stride)
        + u64::cast_from(head * head_bytes + lane % 4 * 4);
    #[unroll]
    for half in 0..2usize {
        let total = 1.0f32 / quad_sum(softmax.total[half]);
        let row = warp_row + lane / 4 + comptime!(8 * half as u32);
        if row < rows {
            let out = out + u64::cast_from(row * q_stride);
            #[unroll]
            for i in 0..comptime!(config.head_dim / 8) {
                let (low, high) = comptime!((2 * half, 2 * half + 1));
                let pair = cvt_halves(sums[i].extract(low) * total, sums[i].extract(high) * total, config.bf16);
                st_global_4(out + comptime!(16 * i as u64), pair);
            }
        }
    }
}

/// Starts the copies of up to [`KEYS`] rows of a head, `stride` bytes apart; rows from `count` on become zeros.
#[cube]
fn copy_rows(to: u32, from: u64, stride: u32, count: u32, #[comptime] config: FlashConfig) {
    let vectors = comptime!(config.head_dim as u32 / 8);
    #[unroll]
    for round in 0..comptime!(KEYS * config.head_dim / 8 / THREADS) {
        let vector = UNIT_POS_X + comptime!((round * THREADS) as u32);
        let (row, column) = (vector / vectors, vector % vectors);
        let bytes = if row < count { 16u32.runtime() } else { 0u32.runtime() };
        let source = from + u64::cast_from(min(row, count - 1) * stride + column * 16);
        cp_async_16_or_zero(to + row * comptime!(config.row_bytes() as u32) + column * 16, source, bytes);
    }
}

/// Masks the scores of positions past a row's own or before its window. `own` is the position of the lane's first row, `key` that of its first score.
#[cube]
fn mask(scores: &mut Array<F4>, own: u32, key: u32, window: u32) {
    #[unroll]
    for i in 0..SCORES {
        let mut four = scores[i];
        #[unroll]
        for element in 0..4usize {
            let row = own + comptime!((element / 2 * 8) as u32);
            let key = key + comptime!((8 * i + element % 2) as u32);
            let is_seen = key <= row && row - key < window;
            four.insert(element, select(is_seen, four.extract(element), MASKED.runtime()));
        }
        scores[i] = four;
    }
}

/// Replaces scores by their exponentials relative to the largest so far of their row, and scales the sums to it (online softmax, arXiv 1805.02867).
#[cube]
fn exponentials(scores: &mut Array<F4>, sums: &mut Array<F4>, softmax: &mut Softmax, #[comptime] config: FlashConfig) {
    let scale = comptime!(config.scale());
    let mut kept = Array::<f32>::new(2usize);
    let mut offset = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let (low, high) = comptime!((2 * half, 2 * half + 1));
        let mut best = softmax.best[half];
        #[unroll]
        for i in 0..SCORES {
            best = max(best, max(scores[i].extract(low), scores[i].extract(high)));
        }
        best = max(best, plane_shuffle_xor(best, 1u32));
        best = max(best, plane_shuffle_xor(best, 2u32));
        kept[half] = ex2_approx((softmax.best[half] - best) * scale);
        offset[half] = -best * scale;
        softmax.best[half] = best;
    }
    let mut added = Array::<f32>::new(2usize);
    added[0] = 0.0;
    added[1] = 0.0;
    #[unroll]
    for i in 0..SCORES {
        let mut four = scores[i];
        #[unroll]
        for element in 0..4usize {
            let half = comptime!(element / 2);
            let part = ex2_approx(fma(four.extract(element), scale.runtime(), offset[half]));
            added[half] += part;
            four.insert(element, part);
        }
        scores[i] = four;
    }
    #[unroll]
    for half in 0..2usize {
        softmax.total[half] = softmax.total[half] * kept[half] + added[half];
    }
    let mut factors = F4::new(kept[0]);
    factors.insert(2usize, kept[1]);
    factors.insert(3usize, kept[1]);
    #[unroll]
    for i in 0..comptime!(config.head_dim / 8) {
        sums[i] *= factors;
    }
}

/// The exponentials of 16 positions as a fragment A: an accumulator has its rows and, for eight of its columns, the same lanes.
#[cube]
fn probabilities(scores: &Array<F4>, #[comptime] step: usize, #[comptime] config: FlashConfig) -> U4 {
    let mut fragment = U4::new(0u32);
    #[unroll]
    for register in 0..4usize {
        let (accumulator, low) = comptime!((2 * step + register / 2, register % 2 * 2));
        let four = scores[accumulator];
        fragment.insert(register, cvt_halves(four.extract(low), four.extract(comptime!(low + 1)), config.bf16));
    }
    fragment
}

/// The sum over the four lanes that have a row.
#[cube]
fn quad_sum(value: f32) -> f32 {
    let pair = value + plane_shuffle_xor(value, 1u32);
    pair + plane_shuffle_xor(pair, 2u32)
}
