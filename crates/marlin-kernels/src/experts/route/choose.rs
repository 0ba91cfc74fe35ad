//! The choice of a token's experts, by one warp.

use super::WARP;
use crate::experts::{Router, RouterScores};
use crate::planes::plane_total;
use crate::ptx::{redux_max, redux_min};
use cubecl::prelude::*;

/// The key of an expert that was chosen, below the key of every score.
const CHOSEN: u32 = 0;

/// Returns a number of the same order as a score: of two finite scores, the larger has the larger
/// key. NaN and infinities have the key of the smallest finite score.
#[cube]
fn key(score: f32) -> u32 {
    let is_finite = score >= f32::new(f32::MIN) && score <= f32::new(f32::MAX);
    let score = select(is_finite, score, f32::new(f32::MIN));
    // -0 is as large as 0.
    let bits = u32::reinterpret(select(score == 0.0, 0.0f32.runtime(), score));
    select(bits >> 31 == 1, !bits, bits | 0x8000_0000u32)
}

/// Chooses the experts of a token. Lane `i` returns the token's expert `i` and its weight.
///
/// A logit that is not finite makes all weights of the token NaN, and is never chosen before finite
/// ones.
#[cube]
pub(super) fn choose<F: Float>(
    logits: &[F],
    correction: &ComptimeOption<&[f32]>,
    token: u32,
    lane: u32,
    factor: f32,
    #[comptime] router: Router,
) -> (u32, f32) {
    let count = comptime!(router.experts.div_ceil(WARP));
    let mut keys = Array::<u32>::new(count);
    let mut values = Array::<f32>::new(count);
    let mut not_finite = 0.0f32.runtime();
    let mut largest = CHOSEN.runtime();
    #[unroll]
    for i in 0..count {
        let expert = lane + comptime!((WARP * i) as u32);
        values[i] = f32::new(f32::MIN);
        keys[i] = CHOSEN.runtime();
        if expert < comptime!(router.experts as u32) {
            let at = token * comptime!(router.experts as u32) + expert;
            values[i] = f32::cast_from(logits[at as usize]);
            not_finite = fma(values[i], 0.0f32, not_finite);
            if comptime!(router.scores == RouterScores::Softmax) {
                keys[i] = key(values[i]);
            } else {
                values[i] = 1.0 / (1.0 + (-values[i]).exp());
                let mut score = values[i];
                #[comptime]
                match correction {
                    ComptimeOption::Some(correction) => score += correction[expert as usize],
                    ComptimeOption::None => {}
                }
                keys[i] = key(score);
            }
        }
        largest = max(largest, keys[i]);
    }
    let not_finite = plane_total(not_finite, WARP);
    let mut total = 1.0f32.runtime();
    if comptime!(router.scores == RouterScores::Softmax) {
        // The largest key back to its logit.
        let key = redux_max(largest);
        let largest = f32::reinterpret(select(key >> 31 == 1, key & 0x7fff_ffffu32, !key));
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for i in 0..count {
            values[i] = (values[i] - largest).exp();
            sum += values[i];
        }
        if comptime!(!router.normalises) {
            total = plane_total(sum, WARP);
        }
    }

    let mut own_expert = 0u32.runtime();
    let mut own_value = 0.0f32.runtime();
    let mut chosen_total = 0.0f32.runtime();
    for choice in 0..comptime!(router.top_k as u32) {
        let mut best = keys[0];
        let mut best_expert = lane;
        let mut best_value = values[0];
        #[unroll]
        for i in 1..count {
            let is_better = keys[i] > best;
            best = select(is_better, keys[i], best);
            best_value = select(is_better, values[i], best_value);
            best_expert = select(is_better, lane + comptime!((WARP * i) as u32), best_expert);
        }
        let most = redux_max(best);
        let expert = redux_min(select(best == most, best_expert, u32::MAX.runtime()));
        let value = plane_shuffle(best_value, expert % 32);
        chosen_total += value;
        if lane == choice {
            own_expert = expert;
            own_value = value;
        }
        #[unroll]
        for i in 0..count {
            if expert == lane + comptime!((WARP * i) as u32) {
                keys[i] = CHOSEN.runtime();
            }
        }
    }
    let divisor = if comptime!(router.normalises) {
        chosen_total
    } else {
        total
    };
    (own_expert, own_value / divisor * factor + not_finite)
}
