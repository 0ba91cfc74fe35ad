use super::config::{Config, STEP_K, THREADS, TILES, WARPS};
use super::input::{Raw, stage};
use super::output::{PART, leave_in_first_block, write};
use super::ptx::{cluster_arrive, cluster_wait};
use super::weight::{Ahead, Words, fragment, ones};
use crate::marlin::fragment::{column_scales, column_zeros};
use crate::ptx::{F4, lane, load_matrix_x4, mma, shared_address, sync_warp};
use cubecl::prelude::*;

/// Lengths of a problem as the kernel sees them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Lengths {
    /// Output features.
    pub n: u32,
    /// Input features, a multiple of 8.
    pub k: u32,
    /// Columns of tiles of the weight: N / 64, rounded up.
    pub tiles_n: u32,
    /// Rows of tiles of the weight: K / 16, rounded up to chunks.
    pub tiles_k: u32,
    /// Groups of the weight with those of its padding.
    pub groups: u32,
    /// [`LOW_NIBBLES`](crate::marlin::kernel::LOW_NIBBLES).
    pub low_nibbles: u32,
    /// [`HIGH_NIBBLES`](crate::marlin::kernel::HIGH_NIBBLES).
    pub high_nibbles: u32,
}

/// Four values of a row.
pub(super) type V4<F> = Vector<F, Const<4>>;

/// sum = x + residual; out = norm(sum) W + bias, W in [`MarlinLayout`](marlin_format::layout::MarlinLayout) padded to chunks.
///
/// A cluster has 64 columns, each of its blocks a part of K, and a block's warps take the steps of its part in turn. The product is computed
/// transposed, as that of many rows is: fragment A holds 16 columns of the weight, and all eight rows of fragment B are the one row.
#[cube(launch_unchecked, cluster_dim = config.cluster_dim())]
pub(super) fn norm_matmul<F: Float>(
    x: &[V4<F>],
    residual: &[V4<F>],
    norm: &[V4<F>],
    sum: &mut [V4<F>],
    words: &[u32],
    scales: &[F],
    zero_points: ComptimeOption<&[u32]>,
    bias: ComptimeOption<&[F]>,
    out: &mut [F],
    epsilon: f32,
    lengths: Lengths,
    #[comptime] config: Config,
    #[define(F)] _dtype: ElemType,
) {
    // Whoever stores in the first block of the cluster waits for this, so that it has begun.
    cluster_arrive();
    let mut staged = Shared::<[V4<F>]>::new_aligned_slice(THREADS, 128usize);
    let mut parts = Shared::<[f32]>::new_slice(comptime!(WARPS * PART));
    let sums = Shared::<[f32]>::new_slice(comptime!(config.blocks * PART));

    let blocks = comptime!(config.blocks as u32);
    let (tile_n, part) = (CUBE_POS_X / blocks, CUBE_POS_X % blocks);
    let steps = lengths.tiles_k.div_ceil(comptime!(TILES as u32));
    let end = steps * (part + 1) / blocks;
    let mut step = steps * part / blocks + UNIT_POS_X / 32;

    let words = Words::new::<F>(words, scales, zero_points, tile_n, &lengths);
    let mut ahead = Ahead::new(config);
    if step < end {
        ahead.aim(&words, step, &lengths);
        #[unroll]
        for tile in 0..TILES {
            ahead.load_tile(&words, tile);
        }
        #[unroll]
        for group in 0..config.groups_in_step() {
            ahead.load_group(&words, step, group, &lengths, config);
        }
    }
    let mut raw = Raw::<F>::new();
    raw.load(x, residual, norm, step, &lengths);
    // Lane 8i + r addresses row r of the matrix i that ldmatrix.x4 loads: eight times the same row.
    let matrices = shared_address::<V4<F>>(&staged) + UNIT_POS_X / 32 * comptime!(2 * STEP_K as u32) + lane() / 8 * 16;

    let mut square = 0.0f32;
    // Of an accumulator's elements the odd ones are the even ones once more: totals j and 4 + j are columns 16j + lane / 4 and the eighth from it.
    let mut totals = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        totals[i] = 0.0;
    }
    let ones = ones(config);
    // A warp asks for its next step as the registers of this one become free, so that as much is under way at any time.
    while step < end {
        let next = step + comptime!(WARPS as u32);
        let more = next < end;
        let (root, step_square) = stage::<F>(&raw, sum, &mut staged, step, tile_n == 0, &lengths);
        square += step_square;
        raw.load(x, residual, norm, next, &lengths);
        ahead.aim(&words, next, &lengths);
        sync_warp();
        #[unroll]
        for group in 0..config.groups_in_step() {
            let mut products = Array::<F4>::new(4usize);
            let mut x_sums = F4::new(0.0);
            #[unroll]
            for j in 0..4usize {
                products[j] = F4::new(0.0);
            }
            let pairs = comptime!(TILES / 2 / config.groups_in_step());
            #[unroll]
            for pair in 0..pairs {
                let pair = comptime!(group * pairs + pair);
                // 32 rows of K: the B fragments of two tiles.
                let b = load_matrix_x4(matrices + comptime!(64 * pair as u32));
                #[unroll]
                for half in 0..2usize {
                    let tile = comptime!(2 * pair + half);
                    let (b0, b1) = (b.extract(comptime!(2 * half)), b.extract(comptime!(2 * half + 1)));
                    #[unroll]
                    for j in 0..4usize {
                        let a = fragment(ahead.tiles[tile].extract(j), &lengths, config);
                        products[j] = mma(a, b0, b1, products[j], config.bf16);
                    }
                    x_sums = mma(ones, b0, b1, x_sums, config.bf16);
                    if more {
                        ahead.load_tile(&words, tile);
                    }
                }
            }
            #[unroll]
            for j in 0..4usize {
                let weights = ahead.group(group, config);
                let zeros = column_zeros(&weights, j, comptime!(config.products()));
                let scales = column_scales(&weights, j, comptime!(config.products()));
                #[unroll]
                for half in 0..2usize {
                    let element = comptime!(2 * half);
                    let product = fma(x_sums.extract(element), zeros.extract(element), products[j].extract(element));
                    let i = comptime!(4 * half + j);
                    totals[i] = fma(product, root * scales.extract(element), totals[i]);
                }
            }
            if more {
                ahead.load_group(&words, next, group, &lengths, config);
            }
        }
        // The input was read before the next one takes its place.
        sync_warp();
        step = next;
    }

    leave_in_first_block(&totals, square, &mut parts, &sums, part, config);
    cluster_arrive();
    if part == 0 {
        cluster_wait();
        write::<F>(&sums, &bias, out, epsilon, tile_n, &lengths, config);
    }
}
