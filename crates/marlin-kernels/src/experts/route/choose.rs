//! The choice of a token's experts, by one warp.
//!
//! Experts are chosen one after the other, each by a reduction over the warp. An order-preserving
//! number takes the place of a score, because there is a reduction of integers in one instruction.
//! If scores are logits of 16 bits, the lower bits of the number are free for the expert, and one
//! reduction finds both. Otherwise a second one finds the first of the experts with the largest
//! score.

use super::WARP;
use crate::experts::router::MAX_EXPERTS;
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

/// Loads the logits of a token: value `i` of a lane is that of expert `first_of_lane + i`.
#[cube]
pub(super) fn load_logits<F: Float>(
    logits: &[F],
    token: u32,
    lane: u32,
    values: &mut Array<f32>,
    #[comptime] router: Router,
) {
    let first = first_of_lane(lane, router);
    #[unroll]
    for i in 0..comptime!(values_of_lane(&router)) {
        let expert = first + comptime!(i as u32);
        values[i] = f32::new(f32::MIN);
        if exists(expert, router) {
            let at = token * comptime!(router.experts as u32) + expert;
            values[i] = f32::cast_from(logits[at as usize]);
        }
    }
}

/// Returns the number of a token's experts whose logits a lane has.
pub(crate) const fn values_of_lane(router: &Router) -> usize {
    router.experts.div_ceil(WARP)
}

/// Returns the first of the consecutive experts whose logits a lane has.
#[cube]
pub(crate) fn first_of_lane(lane: u32, #[comptime] router: Router) -> u32 {
    lane * comptime!(values_of_lane(&router) as u32)
}

/// Returns true if there is an expert of a lane; without a comparison if every lane has as many.
#[cube]
pub(crate) fn exists(expert: u32, #[comptime] router: Router) -> bool {
    if comptime!(router.experts.is_multiple_of(WARP)) {
        true.runtime()
    } else {
        expert < comptime!(router.experts as u32)
    }
}

/// Chooses the experts of a token from its logits, of which value `i` of a lane is that of expert
/// `first_of_lane + i`. Lane `i` returns the token's expert `i` and its weight. The values are
/// replaced. `halves` is true for logits that are f16 or bf16.
///
/// A logit that is not finite makes all weights of the token NaN, and is never chosen before finite
/// ones.
#[cube]
pub(crate) fn choose(
    values: &mut Array<f32>,
    correction: &ComptimeOption<&[f32]>,
    lane: u32,
    factor: f32,
    #[comptime] router: Router,
    #[comptime] halves: bool,
) -> (u32, f32) {
    let mut not_finite = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(values_of_lane(&router)) {
        // A value that stands for no expert is finite.
        not_finite = fma(values[i], 0.0f32, not_finite);
    }
    let not_finite = plane_total(not_finite, WARP);
    let (expert, weight) = if comptime!(packs(&router, halves)) {
        choose_packed(&*values, lane, router)
    } else {
        choose_scores(values, correction, lane, router)
    };
    (expert, weight * factor + not_finite)
}

/// Returns the expert of a token with the given rank, 0 for the best. The other arguments are those
/// of [`choose()`].
#[cube]
pub(crate) fn choose_rank(
    values: &mut Array<f32>,
    correction: &ComptimeOption<&[f32]>,
    lane: u32,
    rank: u32,
    #[comptime] router: Router,
    #[comptime] halves: bool,
) -> u32 {
    if comptime!(packs(&router, halves)) {
        let mut keys = pack_all(&*values, lane, router);
        let mut winner = take_largest(&mut keys, router);
        for _ in 0..rank {
            winner = take_largest(&mut keys, router);
        }
        expert_of(winner)
    } else {
        let (expert, _) = choose_scores(values, correction, lane, router);
        plane_shuffle(expert, rank)
    }
}

/// Returns true if an expert is a part of its key.
const fn packs(router: &Router, halves: bool) -> bool {
    halves && matches!(router.scores, RouterScores::Softmax)
}

/// The lower bits of a key that are zeros for an f16 or bf16, and have the expert.
const EXPERT: u32 = (1 << 13) - 1;
const _: () = assert!(MAX_EXPERTS <= EXPERT as usize + 1, "an expert fits a key");

/// Chooses the experts whose logits are of 16 bits.
#[cube]
fn choose_packed(values: &Array<f32>, lane: u32, #[comptime] router: Router) -> (u32, f32) {
    let mut keys = pack_all(values, lane, router);
    let mut own = 0u32.runtime();
    for choice in 0..comptime!(router.top_k as u32) {
        let winner = take_largest(&mut keys, router);
        own = select(lane == choice, winner, own);
    }
    let logit = logit_of(own);
    let largest = plane_shuffle(logit, 0u32);
    let is_chosen = lane < comptime!(router.top_k as u32);
    let power = select(is_chosen, (logit - largest).exp(), 0.0f32);
    let total = if comptime!(router.normalises) {
        plane_total(power, WARP)
    } else {
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..comptime!(values_of_lane(&router)) {
            sum += (values[i] - largest).exp();
        }
        plane_total(sum, WARP)
    };
    (expert_of(own), power / total)
}

/// Returns the keys of a lane's experts.
#[cube]
fn pack_all(values: &Array<f32>, lane: u32, #[comptime] router: Router) -> Array<u32> {
    let count = comptime!(values_of_lane(&router));
    let mut keys = Array::<u32>::new(count);
    let first = first_of_lane(lane, router);
    #[unroll]
    for i in 0..count {
        let expert = first + comptime!(i as u32);
        // Of equal logits, the first expert has the largest key.
        let packed = key(values[i]) & !EXPERT | (EXPERT - expert);
        keys[i] = select(exists(expert, router), packed, CHOSEN.runtime());
    }
    keys
}

/// Returns the largest key of the warp, and removes it.
#[cube]
fn take_largest(keys: &mut Array<u32>, #[comptime] router: Router) -> u32 {
    let count = comptime!(values_of_lane(&router));
    let mut best = keys[0];
    #[unroll]
    for i in 1..count {
        best = max(best, keys[i]);
    }
    let winner = redux_max(best);
    #[unroll]
    for i in 0..count {
        keys[i] = select(keys[i] == winner, CHOSEN.runtime(), keys[i]);
    }
    winner
}

/// Returns the expert of a key.
#[cube]
fn expert_of(key: u32) -> u32 {
    EXPERT - (key & EXPERT)
}

/// Returns the logit of a key.
#[cube]
fn logit_of(key: u32) -> f32 {
    let is_positive = key >> 31 == 1;
    f32::reinterpret(select(
        is_positive,
        key & comptime!(0x7fff_ffff & !EXPERT),
        !(key | EXPERT),
    ))
}

/// Chooses experts by scores of 32 bits.
#[cube]
fn choose_scores(
    values: &mut Array<f32>,
    correction: &ComptimeOption<&[f32]>,
    lane: u32,
    #[comptime] router: Router,
) -> (u32, f32) {
    let count = comptime!(values_of_lane(&router));
    let first = first_of_lane(lane, router);
    let mut keys = Array::<u32>::new(count);
    let mut largest = CHOSEN.runtime();
    #[unroll]
    for i in 0..count {
        let expert = first + comptime!(i as u32);
        keys[i] = CHOSEN.runtime();
        if exists(expert, router) {
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
        let mut best_expert = first;
        let mut best_value = values[0];
        #[unroll]
        for i in 1..count {
            let is_better = keys[i] > best;
            best = select(is_better, keys[i], best);
            best_value = select(is_better, values[i], best_value);
            best_expert = select(is_better, first + comptime!(i as u32), best_expert);
        }
        let most = redux_max(best);
        let expert = redux_min(select(best == most, best_expert, u32::MAX.runtime()));
        let value = plane_shuffle(best_value, expert / comptime!(count as u32));
        chosen_total += value;
        if lane == choice {
            own_expert = expert;
            own_value = value;
        }
        #[unroll]
        for i in 0..count {
            if expert == first + comptime!(i as u32) {
                keys[i] = CHOSEN.runtime();
            }
        }
    }
    let divisor = if comptime!(router.normalises) {
        chosen_total
    } else {
        total
    };
    (own_expert, own_value / divisor)
}
