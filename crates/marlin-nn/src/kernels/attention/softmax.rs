//! The online softmax (arXiv 1805.02867) of a lane group over its positions.

use super::block::WorkTile;
use super::config::AttentionConfig;
use super::lane_group::{F8, add_dot, lane_group_sum, scaled, staged_vector, widen};
use super::shape::AttentionPass;
use cubecl::prelude::*;

/// The running maximum before the first score. It is less than every score, and finite, so that
/// `NONE - NONE` is 0 and not NaN.
pub(in crate::kernels) const NONE: f32 = -1e30;
/// The score of a masked position. Its exponential is 0 even relative to [`NONE`].
pub(in crate::kernels) const MASKED: f32 = -3e38;

/// The running state of a lane group's online softmax, for each of the block's heads.
#[derive(CubeType)]
pub(super) struct Sums {
    /// The largest score of each head.
    pub best: Array<f32>,
    /// The sum of the exponentials of each head.
    pub total: Array<f32>,
    /// The lane's part of each head's output, not yet divided by the sum.
    pub out: Array<F8>,
}

/// Initialises the sums to no positions. In the block that has the token, the sums of the first
/// lane group start with the token itself.
#[cube]
pub(super) fn start(
    sums: &mut Sums,
    staged: &Shared<[f32]>,
    place: &WorkTile,
    #[comptime] config: AttentionConfig,
) {
    let count = comptime!(config.lane_vectors());
    #[unroll(config.unrolls())]
    for head in 0..config.heads {
        sums.best[head] = NONE;
        sums.total[head] = 0.0;
        #[unroll(config.unrolls())]
        for j in 0..count {
            sums.out[head * count + j] = F8::new(0.0);
        }
    }
    if comptime!(config.pass == AttentionPass::Step) && place.has_token {
        // Every lane group computes the score, because all lanes of a plane must take part in a
        // shuffle.
        let is_mine = place.lane_group == 0;
        #[unroll(config.unrolls())]
        for head in 0..config.heads {
            let mut score = 0.0f32.runtime();
            #[unroll(config.unrolls())]
            for j in 0..count {
                let key = staged_vector(staged, config.heads, j, place, config);
                score = add_dot(score, staged_vector(staged, head, j, place, config), key);
                let value = staged_vector(staged, comptime!(config.heads + 1), j, place, config);
                sums.out[head * count + j] = select(is_mine, value, F8::new(0.0));
            }
            sums.best[head] = select(is_mine, lane_group_sum(score, config), NONE);
            sums.total[head] = select(is_mine, 1.0f32.runtime(), 0.0f32.runtime());
        }
    }
}

/// Computes the scores of the lane group's positions of a tile, for all of the block's heads.
/// Positions past the end of the split are masked.
#[cube]
pub(super) fn score<F: Float, H: Numeric, W: Size>(
    scores: &mut Array<f32>,
    key: &Array<Vector<H, W>>,
    scales: &Array<f32>,
    staged: &Shared<[f32]>,
    first: u32,
    place: &WorkTile,
    #[comptime] config: AttentionConfig,
) {
    let (positions, count) = comptime!((config.positions, config.lane_vectors()));
    #[unroll(config.unrolls())]
    for i in 0..comptime!(config.heads * config.positions) {
        scores[i] = 0.0;
    }
    #[unroll(config.unrolls())]
    for j in 0..count {
        let mut wide = Array::<F8>::new(positions);
        #[unroll(config.unrolls())]
        for i in 0..positions {
            wide[i] = widen::<F, H, W>(key[i * count + j], config);
        }
        #[unroll(config.unrolls())]
        for head in 0..config.heads {
            let query = staged_vector(staged, head, j, place, config);
            #[unroll(config.unrolls())]
            for i in 0..positions {
                scores[head * positions + i] =
                    add_dot(scores[head * positions + i], query, wide[i]);
            }
        }
    }
    #[unroll(config.unrolls())]
    for i in 0..positions {
        let is_there =
            first + u32::cast_from(i) * comptime!(config.lane_groups() as u32) + place.lane_group
                < place.end;
        #[unroll(config.unrolls())]
        for head in 0..config.heads {
            let sum = lane_group_sum(scores[head * positions + i], config);
            let sum = scaled(sum, scales, i, config);
            scores[head * positions + i] = select(is_there, sum, MASKED);
        }
    }
}

/// Adds a tile's values, weighted by the exponentials of its scores, to the lane group's sums.
#[cube]
pub(super) fn accumulate<F: Float, H: Numeric, W: Size>(
    sums: &mut Sums,
    scores: &mut Array<f32>,
    value: &Array<Vector<H, W>>,
    scales: &Array<f32>,
    #[comptime] config: AttentionConfig,
) {
    let (positions, count) = comptime!((config.positions, config.lane_vectors()));
    #[unroll(config.unrolls())]
    for head in 0..config.heads {
        let old = sums.best[head];
        let mut best = old;
        #[unroll(config.unrolls())]
        for i in 0..positions {
            best = max(best, scores[head * positions + i]);
        }
        let kept = (old - best).exp();
        let mut total = sums.total[head] * kept;
        #[unroll(config.unrolls())]
        for i in 0..positions {
            let part = (scores[head * positions + i] - best).exp();
            total += part;
            scores[head * positions + i] = scaled(part, scales, i, config);
        }
        sums.best[head] = best;
        sums.total[head] = total;
        #[unroll(config.unrolls())]
        for j in 0..count {
            sums.out[head * count + j] *= F8::new(kept);
        }
    }
    #[unroll(config.unrolls())]
    for i in 0..positions {
        #[unroll(config.unrolls())]
        for j in 0..count {
            let wide = widen::<F, H, W>(value[i * count + j], config);
            #[unroll(config.unrolls())]
            for head in 0..config.heads {
                sums.out[head * count + j] += wide * F8::new(scores[head * positions + i]);
            }
        }
    }
}
