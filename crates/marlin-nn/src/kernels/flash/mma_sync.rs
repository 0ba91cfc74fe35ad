//! The attention kernel on `mma.sync`, which runs on every supported card.

use super::config::{FlashConfig, FlashLengths, TileRows};
use super::softmax::{Softmax, exponentials, mask, probabilities, write};
use super::tiles::TILE_ROWS;
use crate::cache::position_start;
use cubecl::prelude::*;
use marlin_kernels::pdl::launch_dependents_and_wait;
use marlin_kernels::ptx::{
    F4, U4, cp_async_16_or_zero, cp_async_commit_group, cp_async_wait_group, global_address,
    global_address_mut, lane, ldmatrix_x4, ldmatrix_x4_trans, mma_m16n8k16, shared_address,
};

/// The number of rows of a block: half a tile.
const ROWS: usize = TILE_ROWS / 2;
/// The number of positions of keys and values that a block holds in shared memory at a time.
const KEYS: usize = 64;
/// The number of threads of a block: a warp for every 16 rows.
pub(super) const THREADS: usize = 2 * ROWS;
/// The number of accumulators of a warp's scores, of eight positions each.
const SCORES: usize = KEYS / 8;

impl FlashConfig {
    /// Returns the number of bytes between the starts of two rows in shared memory.
    const fn row_bytes(&self) -> usize {
        self.head_bytes() + 16
    }

    /// Returns the number of bytes of shared memory of the queries, and of the keys or the values
    /// at a time.
    const fn tile_bytes(&self) -> usize {
        KEYS * self.row_bytes()
    }

    /// Returns true if a warp keeps its queries in registers. Otherwise the warp loads its queries
    /// for every product.
    const fn holds_queries(&self) -> bool {
        self.head_dim <= 64
    }
}

/// Computes out = softmax(q kᵀ / sqrt(head_dim)) v for half a tile and one query head; see the
/// documentation of the module `flash`. The grid is heads by tiles by halves.
#[cube(launch_unchecked)]
pub(super) fn flash<F: Float>(
    queries: &[F],
    state: &[i32],
    tiles: &[i32],
    keys: &[F],
    values: &[F],
    pages: ComptimeOption<&[i32]>,
    sinks: ComptimeOption<&[F]>,
    out: &mut [F],
    lengths: FlashLengths,
    #[comptime] config: FlashConfig,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let tile = TileRows::read(tiles, state, CUBE_POS_Y, &lengths);
    // The number of rows of the tile before this block's half.
    let skipped = CUBE_POS_Z * comptime!(ROWS as u32);
    if tile.count <= skipped {
        terminate!();
    }
    let (first_row, rows) = (
        tile.first + skipped,
        min(tile.count - skipped, comptime!(ROWS as u32)),
    );
    let tile = TileRows {
        first: first_row,
        count: rows,
        position: tile.position + skipped,
        slot: tile.slot,
    };
    let (position, end) = (tile.position, tile.end());

    let (head_bytes, row_bytes, steps) = comptime!((
        config.head_bytes() as u32,
        config.row_bytes() as u32,
        config.steps()
    ));
    let tile_bytes = comptime!(config.tile_bytes() as u32);
    let shared =
        Shared::<[u32]>::new_aligned_slice(comptime!(3 * config.tile_bytes() / 4), 16usize);
    let query_tile = shared_address::<u32>(&shared);
    let (key_tile, value_tile) = (query_tile + tile_bytes, query_tile + 2 * tile_bytes);
    let head = CUBE_POS_X;
    let q_stride = lengths.heads * head_bytes;
    let q = global_address::<F>(queries)
        + u64::cast_from(first_row) * u64::cast_from(q_stride)
        + u64::cast_from(head * head_bytes);
    let (keys, values) = (global_address::<F>(keys), global_address::<F>(values));

    let mut first = tile.first_key(&lengths, comptime!(KEYS as u32));
    copy_rows(query_tile, q, q_stride, rows, config);
    copy_positions(key_tile, keys, &pages, &tile, first, &lengths, config);
    cp_async_commit_group();
    copy_positions(value_tile, values, &pages, &tile, first, &lengths, config);
    cp_async_commit_group();

    // The offsets of the lane's rows of the matrices that `ldmatrix` reads. In fragments A and
    // transposed fragments B, the second matrix has rows 8 to 15; in other fragments B, it has
    // features 8 to 15.
    let lane = lane();
    let (by_rows, by_features) = (
        lane % 16 * row_bytes + lane / 16 * 16,
        (lane / 16 * 8 + lane % 8) * row_bytes + lane / 8 % 2 * 16,
    );
    let warp_row = UNIT_POS_X / 32 * 16;
    let warp_queries = query_tile + warp_row * row_bytes + by_rows;
    // The position of the lane's first row; its second row is eight positions further.
    let own = position + warp_row + lane / 4;

    let mut q_held = Array::<U4>::new(comptime!(if config.holds_queries() {
        config.steps()
    } else {
        1
    }));
    let mut sums = Array::<F4>::new(comptime!(config.head_dim / 8));
    #[unroll]
    for i in 0..comptime!(config.head_dim / 8) {
        sums[i] = F4::new(0.0);
    }
    let mut softmax = Softmax::new();
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
            let a = if comptime!(config.holds_queries()) {
                q_held[step]
            } else {
                ldmatrix_x4(warp_queries + comptime!(32 * step as u32))
            };
            #[unroll]
            for pair in 0..comptime!(SCORES / 2) {
                let b = ldmatrix_x4(
                    key_tile
                        + by_features
                        + comptime!((16 * pair) as u32 * row_bytes + 32 * step as u32),
                );
                let (left, right) = comptime!((2 * pair, 2 * pair + 1));
                scores[left] = mma_m16n8k16(
                    a,
                    b.extract(0usize),
                    b.extract(1usize),
                    scores[left],
                    config.bf16,
                );
                scores[right] = mma_m16n8k16(
                    a,
                    b.extract(2usize),
                    b.extract(3usize),
                    scores[right],
                    config.bf16,
                );
            }
        }
        sync_cube();
        if next < end {
            copy_positions(key_tile, keys, &pages, &tile, next, &lengths, config);
        }
        cp_async_commit_group();

        // Scores are masked only at the diagonal and at the start of the window.
        let last = position + warp_row + 15;
        if next > position + warp_row + 1 || last - first >= lengths.window {
            mask(
                &mut scores,
                own,
                first + lane % 4 * 2,
                lengths.window,
                SCORES,
            );
        }
        let factors = exponentials(&mut scores, &mut softmax, SCORES, config);
        #[unroll]
        for i in 0..comptime!(config.head_dim / 8) {
            sums[i] *= factors;
        }

        cp_async_wait_group(1usize);
        sync_cube();
        #[unroll]
        for step in 0..comptime!(KEYS / 16) {
            let a = probabilities(&scores, step, config);
            #[unroll]
            for pair in 0..comptime!(config.head_dim / 16) {
                let b = ldmatrix_x4_trans(
                    value_tile
                        + by_rows
                        + comptime!((16 * step) as u32 * row_bytes + 32 * pair as u32),
                );
                let (left, right) = comptime!((2 * pair, 2 * pair + 1));
                sums[left] = mma_m16n8k16(
                    a,
                    b.extract(0usize),
                    b.extract(1usize),
                    sums[left],
                    config.bf16,
                );
                sums[right] = mma_m16n8k16(
                    a,
                    b.extract(2usize),
                    b.extract(3usize),
                    sums[right],
                    config.bf16,
                );
            }
        }
        sync_cube();
        if next < end {
            copy_positions(value_tile, values, &pages, &tile, next, &lengths, config);
        }
        cp_async_commit_group();
        first = next;
    }

    let out = global_address_mut::<F>(out)
        + u64::cast_from(first_row) * u64::cast_from(q_stride)
        + u64::cast_from(head * head_bytes);
    write(
        &sums, &softmax, &sinks, out, warp_row, rows, q_stride, config,
    );
}

/// Starts the copies of [`KEYS`] positions of the keys or the values, from `first` on. The rows of
/// positions past the end of the tile are filled with zeros.
#[cube]
fn copy_positions(
    to: u32,
    cache: u64,
    pages: &ComptimeOption<&[i32]>,
    tile: &TileRows,
    first: u32,
    lengths: &FlashLengths,
    #[comptime] config: FlashConfig,
) {
    let vectors = comptime!(config.head_dim as u32 / 8);
    #[unroll]
    for round in 0..comptime!(KEYS * config.head_dim / 8 / THREADS) {
        let vector = UNIT_POS_X + comptime!((round * THREADS) as u32);
        let (row, column) = (vector / vectors, vector % vectors);
        let bytes = if first + row < tile.end() {
            16u32.runtime()
        } else {
            0u32.runtime()
        };
        let source = cache
            + position_start::<u64>(
                pages,
                tile.slot,
                CUBE_POS_X / lengths.group,
                min(first + row, tile.end() - 1),
                &lengths.cache,
                config.page_size,
                comptime!(config.head_bytes() as u32),
            )
            + u64::cast_from(column * 16);
        cp_async_16_or_zero(
            to + row * comptime!(config.row_bytes() as u32) + column * 16,
            source,
            bytes,
        );
    }
}

/// Starts the copies of up to [`KEYS`] query rows of a head, `stride` bytes apart. Rows from
/// `count` on are filled with zeros.
#[cube]
fn copy_rows(to: u32, from: u64, stride: u32, count: u32, #[comptime] config: FlashConfig) {
    let vectors = comptime!(config.head_dim as u32 / 8);
    #[unroll]
    for round in 0..comptime!(KEYS * config.head_dim / 8 / THREADS) {
        let vector = UNIT_POS_X + comptime!((round * THREADS) as u32);
        let (row, column) = (vector / vectors, vector % vectors);
        let bytes = if row < count {
            16u32.runtime()
        } else {
            0u32.runtime()
        };
        let source = from + u64::cast_from(min(row, count - 1) * stride + column * 16);
        cp_async_16_or_zero(
            to + row * comptime!(config.row_bytes() as u32) + column * 16,
            source,
            bytes,
        );
    }
}
