//! Top-k and top-p: where the tokens end that they keep, from the most likely on.
//!
//! Tokens are ordered by place: how far the key of their logit is below the largest, then the token, in one integer. A token counts 1 for
//! top-k, and for top-p its probability as an integer. The last token kept is the first at which the sum of all up to it reaches k, or p of
//! the whole. It is found ten bits of the place at a time: sums of tokens by these bits, the bits at which the sum is reached, and again
//! with the next ten among the tokens that have them. Sums of integers are the same in any order.

use super::kernel::penalised;
use super::noise::{key, mass, value};
use super::{BROKEN, TOKEN_BITS};
use cubecl::prelude::*;

/// Bits of a place that are found at a time.
const DIGIT_BITS: usize = 10;
/// Sums by such bits.
const BINS: usize = 1 << DIGIT_BITS;
/// Bits of a place.
const PLACE_BITS: usize = 32 + TOKEN_BITS;
/// The place of a token that is never chosen.
const NOWHERE: u64 = u64::MAX;

/// A row, as top-k and top-p need it.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Filter {
    /// The row's first logit.
    pub first: u32,
    /// Logits of the row.
    pub vocab: u32,
    /// The first word of the slot's bitmap.
    pub seen: u32,
    pub penalty: f32,
    pub temperature: f32,
    /// The key of the row's largest logit.
    pub largest: u32,
}

#[cube]
impl Filter {
    /// The logit of a token, after the repetition penalty.
    pub fn logit<F: Float>(&self, logits: &[F], seen: &[u32], token: u32) -> f32 {
        penalised::<F>(logits[(self.first + token) as usize], token, seen[(self.seen + token / 32) as usize], self.penalty)
    }

    /// The place of a token in the order from the most likely to the least.
    pub fn place(&self, logit: f32, token: u32) -> u64 {
        let key = key(logit);
        let mut place = NOWHERE.runtime();
        if key != 0 && key != BROKEN {
            place = (u64::cast_from(self.largest - key) << comptime!(TOKEN_BITS as u64)) | u64::cast_from(token);
        }
        place
    }

    /// What a token counts for top-p: its probability over that of the most likely one.
    fn mass(&self, logit: f32) -> u64 {
        mass((logit - value(self.largest)) / self.temperature)
    }
}

/// Sums of 64 bits by bin. The halves are apart because atomics of 64 bits in shared memory are slow.
#[derive(CubeType)]
struct Histogram {
    low: Shared<[Atomic<u32>]>,
    high: Shared<[Atomic<u32>]>,
}

#[cube]
impl Histogram {
    fn add(&self, bin: usize, value: u64) {
        let low = u32::cast_from(value);
        let old = self.low[bin].fetch_add(low);
        let mut high = u32::cast_from(value >> 32);
        let sum = old + low;
        // It wrapped round.
        if sum < low {
            high += 1;
        }
        if high > 0 {
            self.high[bin].fetch_add(high);
        }
    }

    fn get(&self, bin: usize) -> u64 {
        (u64::cast_from(self.high[bin].load()) << 32) | u64::cast_from(self.low[bin].load())
    }
}

/// The place of the last token that top-k and then top-p keep.
#[cube]
pub(super) fn last_kept<F: Float>(
    filter: &Filter,
    top_k: u32,
    top_p: f32,
    logits: &[F],
    seen: &[u32],
    shared: &mut Shared<[u64]>,
    #[comptime] units: usize,
) -> u64 {
    let histogram = Histogram { low: Shared::<[Atomic<u32>]>::new_slice(BINS), high: Shared::<[Atomic<u32>]>::new_slice(BINS) };
    let mut last = comptime!(NOWHERE - 1).runtime();
    if top_k > 0 && top_k < filter.vocab {
        last = reach::<F>(filter, last, top_k, 1.0f32, logits, seen, &histogram, shared, units);
    }
    if top_p < 1.0f32 {
        last = reach::<F>(filter, last, 0u32.runtime(), top_p, logits, seen, &histogram, shared, units);
    }
    last
}

/// The place of the first token at which the sum of all up to it reaches `count` tokens, or, where that is 0, `top_p` of the probability of
/// all up to `end`.
#[cube]
fn reach<F: Float>(
    filter: &Filter,
    end: u64,
    count: u32,
    top_p: f32,
    logits: &[F],
    seen: &[u32],
    histogram: &Histogram,
    shared: &mut Shared<[u64]>,
    #[comptime] units: usize,
) -> u64 {
    let unit = UNIT_POS_X as usize;
    let each = comptime!(BINS / units);
    // The bits of the place that are known, those that are not, and what is left to reach within.
    let mut known = 0u64.runtime();
    let mut unknown = comptime!(PLACE_BITS as u64).runtime();
    let mut target = u64::cast_from(count);
    let mut found = Shared::<[u64]>::new_slice(3usize);
    while unknown > 0 {
        let shift = unknown - comptime!(DIGIT_BITS as u64);
        for i in 0..each {
            histogram.low[unit * each + i].store(0u32);
            histogram.high[unit * each + i].store(0u32);
        }
        sync_cube();
        let mut token = UNIT_POS_X;
        while token < filter.vocab {
            let logit = filter.logit::<F>(logits, seen, token);
            let place = filter.place(logit, token);
            if place <= end && place >> unknown == known {
                let mut counts = 1u64.runtime();
                if count == 0 {
                    counts = filter.mass(logit);
                }
                histogram.add(((place >> shift) & comptime!(BINS as u64 - 1)) as usize, counts);
            }
            token += comptime!(units as u32);
        }
        sync_cube();

        // The sums of all bins up to a unit's last.
        let mut own = 0u64.runtime();
        for i in 0..each {
            own += histogram.get(unit * each + i);
        }
        let through = prefix_sum(own, shared, units);
        let total = shared[comptime!(units - 1)];
        if unknown == comptime!(PLACE_BITS as u64) {
            if count == 0 {
                target = fraction(total, top_p);
            }
            // There may be fewer tokens than k; one is always kept.
            target = max(min(target, total), 1u64.runtime());
        }
        if through >= target && through - own < target {
            let mut sum = through - own;
            let mut bin = (unit * each) as u64;
            let mut next = sum + histogram.get(bin as usize);
            while next < target {
                sum = next;
                bin += 1;
                next = sum + histogram.get(bin as usize);
            }
            found[0] = bin;
            found[1] = sum;
            found[2] = next;
        }
        sync_cube();
        known = (known << comptime!(DIGIT_BITS as u64)) | found[0];
        unknown = shift;
        if count > 0 && found[2] == target {
            // All of the bin are kept: the last place that has these bits will do.
            known = ((known + 1) << unknown) - 1;
            unknown = 0u64.runtime();
        }
        target -= found[1];
    }
    sync_cube();
    known
}

/// The sum of the values of all units up to this one, which `shared` then holds for every unit.
#[cube]
fn prefix_sum(value: u64, shared: &mut Shared<[u64]>, #[comptime] units: usize) -> u64 {
    let unit = UNIT_POS_X as usize;
    let mut sum = value;
    shared[unit] = sum;
    sync_cube();
    let mut distance = 1usize.runtime();
    while distance < units {
        let mut before = 0u64.runtime();
        if unit >= distance {
            before = shared[unit - distance];
        }
        sync_cube();
        sum += before;
        shared[unit] = sum;
        sync_cube();
        distance *= 2;
    }
    sum
}

/// p of a sum, rounded up. p is taken in steps of 2^-32.
#[cube]
fn fraction(sum: u64, p: f32) -> u64 {
    let p = u64::cast_from(p * 4_294_967_296.0f32);
    let low = (sum & 0xffff_ffffu64) * p + 0xffff_ffffu64;
    (sum >> 32) * p + (low >> 32)
}
