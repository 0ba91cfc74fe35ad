//! The online softmax (arXiv 1805.02867) of a warp's scores, in the layout of the accumulators of
//! `mma.m16n8k16`: a lane has two of 16 rows, and two of every eight positions.

use super::config::FlashConfig;
use crate::kernels::attention::{MASKED, NONE};
use cubecl::prelude::*;
use marlin_kernels::planes::plane_total;
use marlin_kernels::ptx::{F4, U4, cvt_halves, ex2_approx, lane, st_global_4};

/// The running state of a warp's softmax, for the lane's two rows of 16.
#[derive(CubeType)]
pub(super) struct Softmax {
    /// The largest score of each row.
    best: Array<f32>,
    /// The lane's part of each row's sum of the exponentials.
    total: Array<f32>,
}

#[cube]
impl Softmax {
    /// Creates the state of a softmax over no positions.
    pub fn new() -> Softmax {
        let mut softmax = Softmax {
            best: Array::<f32>::new(2usize),
            total: Array::<f32>::new(2usize),
        };
        #[unroll]
        for row in 0..2usize {
            softmax.best[row] = NONE;
            softmax.total[row] = 0.0;
        }
        softmax
    }
}

/// Masks the scores of positions past a row's own or before its window. `own` is the position of
/// the lane's first row, and `key` is that of the lane's first score.
#[cube]
pub(super) fn mask(
    scores: &mut Array<F4>,
    own: u32,
    key: u32,
    window: u32,
    #[comptime] count: usize,
) {
    #[unroll]
    for i in 0..count {
        let mut four = scores[i];
        #[unroll]
        for element in 0..4usize {
            let row = own + comptime!((element / 2 * 8) as u32);
            let key = key + comptime!((8 * i + element % 2) as u32);
            let is_seen = key <= row && row - key < window;
            four.insert(
                element,
                select(is_seen, four.extract(element), MASKED.runtime()),
            );
        }
        scores[i] = four;
    }
}

/// Replaces the scores of `count` accumulators by their exponentials, relative to the largest score
/// of the row so far. Returns the factors by which the caller multiplies the sums of the previous
/// positions, in the layout of an accumulator.
#[cube]
pub(super) fn exponentials(
    scores: &mut Array<F4>,
    softmax: &mut Softmax,
    #[comptime] count: usize,
    #[comptime] config: FlashConfig,
) -> F4 {
    let scale = comptime!(config.scale());
    let mut kept = Array::<f32>::new(2usize);
    let mut offset = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let (low, high) = comptime!((2 * half, 2 * half + 1));
        let mut best = softmax.best[half];
        #[unroll]
        for i in 0..count {
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
    for i in 0..count {
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
    factors
}

/// Returns the exponentials of 16 positions as a fragment A. An accumulator has the rows of the
/// fragment, and distributes eight of its columns over the same lanes.
#[cube]
pub(super) fn probabilities(
    scores: &Array<F4>,
    #[comptime] step: usize,
    #[comptime] config: FlashConfig,
) -> U4 {
    let mut fragment = U4::new(0u32);
    #[unroll]
    for register in 0..4usize {
        let (accumulator, low) = comptime!((2 * step + register / 2, register % 2 * 2));
        let four = scores[accumulator];
        fragment.insert(
            register,
            cvt_halves(
                four.extract(low),
                four.extract(comptime!(low + 1)),
                config.bf16,
            ),
        );
    }
    fragment
}

/// Divides the sums by the sums of the exponentials, to which that of the head's score without a
/// position belongs, and writes the rows below `rows`. `warp_row`
/// is the warp's first row of the tile, `out` is the address of the tile's first row in the head,
/// and `stride` is the number of bytes between rows.
#[cube]
pub(super) fn write<F: Float>(
    sums: &Array<F4>,
    softmax: &Softmax,
    sinks: &ComptimeOption<&[F]>,
    out: u64,
    warp_row: u32,
    rows: u32,
    stride: u32,
    #[comptime] config: FlashConfig,
) {
    let out = out + u64::cast_from(lane() % 4 * 4);
    #[unroll]
    for half in 0..2usize {
        let mut total = quad_sum(softmax.total[half]);
        #[comptime]
        match sinks {
            ComptimeOption::Some(sinks) => {
                // Scores are not yet multiplied by 1 / sqrt(head_dim).
                let sink = f32::cast_from(sinks[CUBE_POS_X as usize]);
                let scale = comptime!(config.scale());
                total += ex2_approx(sink * std::f32::consts::LOG2_E - softmax.best[half] * scale);
            }
            ComptimeOption::None => {}
        }
        let total = 1.0f32 / total;
        let row = warp_row + lane() / 4 + comptime!(8 * half as u32);
        if row < rows {
            let out = out + u64::cast_from(row * stride);
            #[unroll]
            for i in 0..comptime!(config.head_dim / 8) {
                let (low, high) = comptime!((2 * half, 2 * half + 1));
                let pair = cvt_halves(
                    sums[i].extract(low) * total,
                    sums[i].extract(high) * total,
                    config.bf16,
                );
                st_global_4(out + comptime!(16 * i as u64), pair);
            }
        }
    }
}

/// Returns the sum over the four lanes that have a row.
#[cube]
fn quad_sum(value: f32) -> f32 {
    plane_total(value, 4usize)
}
