//! Top-k, top-p and min-p: the last token that they keep, in the order from the most likely to the
//! least.
//!
//! Tokens are ordered by place: how far the key of their logit is below the largest, then the
//! token, in one integer. A token counts 1 for top-k, and for top-p its probability as an integer.
//! The last token kept is the first at which the sum of all up to it reaches k, or p of the whole.
//! It is found some bits of the place at a time: sums of tokens by these bits, the bits at which
//! the sum is reached, and again with the next bits among the tokens that have them. Sums of
//! integers are the same in any order. What min-p keeps follows from the largest logit alone: a
//! probability of at least p times the largest is a logit of at least the largest + temperature *
//! ln p.
//!
//! Blocks that cannot have kept tokens are skipped: each of k blocks has a token at least as likely
//! as the least likely of the blocks' best tokens, and tokens whose probabilities add up to less
//! than 1 - p are past the end. So the shortlist of most rows has few blocks.

use super::bins::{BINS, Bins, DIGIT_BITS, FOUND, prefix_sum};
use super::floats::{SharedValues, SharedWords};
use super::logits::Logits;
use super::noise::{key, ln, mass, value};
use super::{BLOCK, BROKEN, CHUNK_BLOCKS, MASS_BITS, MIN_MIN_P, RECORD, TOKEN_BITS};
use cubecl::prelude::*;

/// Bytes of shared memory that the search takes with a shortlist of `blocks` blocks.
pub(super) const fn shared_bytes(blocks: usize) -> usize {
    size_of::<u32>() * (blocks + 2 + 3 * BINS) + size_of::<u64>() * FOUND
}

/// The place of a token that is never chosen.
const NOWHERE: u64 = u64::MAX;

/// The tokens that a row keeps.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Kept {
    /// 0 where all tokens count.
    pub top_k: u32,
    /// 1 where all tokens count.
    pub top_p: f32,
    /// Below [`MIN_MIN_P`] where all tokens count.
    pub min_p: f32,
}

/// A row, as top-k, top-p and min-p need it.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Filter {
    pub logits: Logits,
    pub temperature: f32,
    /// One over it.
    pub inverse_temperature: f32,
    /// The key of the row's largest logit.
    pub largest: u32,
    /// The row's first record.
    pub record: u32,
    /// Blocks that the row's records have keys of.
    pub blocks: u32,
}

/// Blocks of 32 tokens, in any order.
#[derive(CubeType)]
pub(super) struct Shortlist {
    blocks: SharedWords,
    length: Shared<[Atomic<u32>]>,
}

#[cube]
impl Shortlist {
    /// Room for so many.
    pub fn new(#[comptime] blocks: usize, #[comptime] is_loose: bool) -> Self {
        Shortlist {
            blocks: SharedWords::new(blocks, is_loose),
            length: Shared::<[Atomic<u32>]>::new_slice(1usize),
        }
    }

    /// The number of runs of four tokens.
    pub fn fours(&self) -> u32 {
        self.length[0].load() * comptime!(BLOCK as u32 / 4)
    }

    /// The first token of a run of four.
    pub fn token(&self, four: u32) -> u32 {
        let fours = comptime!(BLOCK as u32 / 4);
        self.blocks.get((four / fours) as usize) * comptime!(BLOCK as u32) + four % fours * 4
    }
}

#[cube]
impl Filter {
    /// The place of a token in the order from the most likely to the least.
    pub fn place(&self, logit: f32, token: u32) -> u64 {
        let key = key(logit);
        let mut place = NOWHERE.runtime();
        if key != 0 && key != BROKEN {
            place = (u64::cast_from(self.largest - key) << comptime!(TOKEN_BITS as u64))
                | u64::cast_from(token);
        }
        place
    }

    /// The count of a token for top-p: its probability over that of the most likely one.
    fn mass(&self, logit: f32) -> u64 {
        let floats = &self.logits.floats;
        mass(floats.rounded(floats.rounded(logit - value(self.largest)) * self.inverse_temperature))
    }

    /// The largest key of a block; 0 where none of its tokens can be chosen.
    fn block(&self, records: &[u32], block: u32) -> u32 {
        let chunk_blocks = comptime!(CHUNK_BLOCKS as u32);
        records[(self.record + block / chunk_blocks) as usize * RECORD
            + 2
            + (block % chunk_blocks) as usize]
    }

    /// An upper bound of the distance of the `k` most likely tokens' keys from the largest key,
    /// from the keys of blocks only.
    fn span_of_k(
        &self,
        k: u32,
        records: &[u32],
        bins: &mut Bins,
        sums: &mut SharedValues,
        #[comptime] units: usize,
    ) -> u32 {
        let mut known = 0u64.runtime();
        let mut target = u64::cast_from(k);
        let mut unknown = 32u64.runtime();
        let mut few = false;
        // The bits left after two turns matter little.
        while unknown > comptime!(32 - 2 * DIGIT_BITS as u64) {
            let shift = unknown - comptime!(DIGIT_BITS as u64);
            bins.clear(units);
            let mut block = UNIT_POS_X;
            while block < self.blocks {
                let key = self.block(records, block);
                let distance = u64::cast_from(self.largest - key);
                if key != 0 && distance >> unknown == known {
                    bins.add(
                        (distance >> shift) & comptime!(BINS as u64 - 1),
                        1u64.runtime(),
                    );
                }
                block += comptime!(units as u32);
            }
            let found = bins.find(target, sums, units);
            if found.total < target {
                few = true;
            }
            known = (known << comptime!(DIGIT_BITS as u64)) | found.bin;
            target = min(target, found.total) - found.before;
            unknown = shift;
        }
        let mut span = u32::cast_from(((known + 1) << unknown) - 1);
        if few {
            span = u32::MAX.runtime();
        }
        span
    }

    /// An upper bound of the distance of the kept tokens' keys from the largest key, where the
    /// tokens past the last kept one have a mass of `rest`.
    fn span_of_rest(&self, rest: u64) -> u32 {
        // Tokens of less mass than this are less than the rest, all together. Half of it leaves
        // room for rounding.
        let least = max(rest / u64::cast_from(self.logits.vocab) / 2, 1u64.runtime());
        let largest = value(self.largest);
        let depth = comptime!(MASS_BITS as f32 * core::f32::consts::LN_2).runtime()
            - ln(f32::cast_from(least), &self.logits.floats);
        let margin = max(largest, -largest) * 1e-6f32;
        self.largest - key(largest - depth * self.temperature - margin)
    }

    /// The distance from the largest key of the last one that min-p keeps.
    fn span_of_min_p(&self, min_p: f32) -> u32 {
        let mut span = u32::MAX.runtime();
        if min_p >= MIN_MIN_P {
            span = self.largest
                - key(fma(
                    self.temperature,
                    ln(min_p, &self.logits.floats),
                    value(self.largest),
                ));
        }
        span
    }

    /// Puts the blocks on the shortlist whose largest key is no more than `span` below the row's.
    fn list(
        &self,
        span: u32,
        records: &[u32],
        shortlist: &mut Shortlist,
        #[comptime] units: usize,
    ) {
        sync_cube();
        if UNIT_POS_X == 0 {
            shortlist.length[0].store(0u32);
        }
        sync_cube();
        let mut block = UNIT_POS_X;
        while block < self.blocks {
            let key = self.block(records, block);
            if key != 0 && self.largest - key <= span {
                let at = shortlist.length[0].fetch_add(1u32);
                shortlist.blocks.set(at as usize, block);
            }
            block += comptime!(units as u32);
        }
        sync_cube();
    }
}

/// The last place of a token whose key is no more than `span` below the largest.
#[cube]
fn last_within(span: u32) -> u64 {
    ((u64::cast_from(span) + 1) << comptime!(TOKEN_BITS as u64)) - 1
}

/// The place of the last token that top-k, then top-p and then min-p keep. The shortlist then has
/// all tokens up to it.
#[cube]
pub(super) fn last_kept<F: Float, N: Size>(
    filter: &Filter,
    kept: &Kept,
    logits: &[Vector<F, N>],
    bitmaps: &[u32],
    records: &[u32],
    shortlist: &mut Shortlist,
    sums: &mut SharedValues,
    #[comptime] lanes: usize,
    #[comptime] units: usize,
) -> u64 {
    let mut bins = Bins::new(filter.logits.floats.is_loose);
    let (top_k, top_p) = (kept.top_k, kept.top_p);
    let everywhere = comptime!(NOWHERE - 1).runtime();
    let mut last = everywhere;
    let mut span = u32::MAX.runtime();
    let likely = filter.span_of_min_p(kept.min_p);
    if top_k > 0 && top_k < filter.logits.vocab {
        span = filter.span_of_k(top_k, records, &mut bins, sums, units);
    }
    if top_p >= 1.0f32 {
        span = min(span, likely);
    }
    filter.list(span, records, shortlist, units);
    if top_k > 0 && top_k < filter.logits.vocab {
        last = reach::<F, N>(
            filter,
            u64::cast_from(top_k),
            span,
            last,
            logits,
            bitmaps,
            &*shortlist,
            &mut bins,
            sums,
            false,
            lanes,
            units,
        );
    }
    if top_p < 1.0f32 {
        let mut own = 0u64.runtime();
        let mut i = UNIT_POS_X;
        while i < shortlist.fours() {
            let token = shortlist.token(i);
            let four = filter.logits.four::<F, N>(logits, bitmaps, token, lanes);
            #[unroll]
            for j in 0..4usize {
                let mut kept = true;
                if last != everywhere {
                    kept = filter.place(four.extract(j), token + comptime!(j as u32)) <= last;
                }
                if kept {
                    own += filter.mass(four.extract(j));
                }
            }
            i += comptime!(units as u32);
        }
        let (_, total) = prefix_sum(own, sums, units);
        let target = max(fraction(total, top_p), 1u64.runtime());
        span = min(min(span, likely), filter.span_of_rest(total - target));
        filter.list(span, records, shortlist, units);
        last = reach::<F, N>(
            filter,
            target,
            span,
            last,
            logits,
            bitmaps,
            &*shortlist,
            &mut bins,
            sums,
            true,
            lanes,
            units,
        );
    }
    min(last, last_within(likely))
}

/// The place of the first token at which the sum of all up to it reaches `target`: a number of
/// tokens, or a mass. Tokens past `end` or more than `span` below the largest are not looked at.
#[cube]
fn reach<F: Float, N: Size>(
    filter: &Filter,
    target: u64,
    span: u32,
    end: u64,
    logits: &[Vector<F, N>],
    bitmaps: &[u32],
    shortlist: &Shortlist,
    bins: &mut Bins,
    sums: &mut SharedValues,
    #[comptime] by_mass: bool,
    #[comptime] lanes: usize,
    #[comptime] units: usize,
) -> u64 {
    let token_bits = comptime!(TOKEN_BITS as u64);
    let end = min(end, last_within(span));
    // The bits of the place that are known, how many are not, and what is left to reach among
    // places with those bits.
    let mut known = 0u64.runtime();
    let mut unknown = u64::cast_from(32 - span.leading_zeros()) + token_bits;
    let mut left = target;
    while unknown > 0 {
        // The bits of the key end where a turn does.
        let mut shift = max(unknown, comptime!(DIGIT_BITS as u64)) - comptime!(DIGIT_BITS as u64);
        if unknown > token_bits {
            shift = max(shift, token_bits);
        }
        bins.clear(units);
        let mut i = UNIT_POS_X;
        while i < shortlist.fours() {
            let token = shortlist.token(i);
            let four = filter.logits.four::<F, N>(logits, bitmaps, token, lanes);
            #[unroll]
            for j in 0..4usize {
                let place = filter.place(four.extract(j), token + comptime!(j as u32));
                if place <= end && place >> unknown == known {
                    let mut counts = 1u64.runtime();
                    if by_mass {
                        counts = filter.mass(four.extract(j));
                    }
                    bins.add((place >> shift) - (known << (unknown - shift)), counts);
                }
            }
            i += comptime!(units as u32);
        }
        let found = bins.find(left, sums, units);
        left = min(left, found.total);
        known = (known << (unknown - shift)) | found.bin;
        unknown = shift;

        // The count of each token of the bin, where it is the same for all.
        let mut each = 1u64.runtime();
        if by_mass {
            each = 0u64.runtime();
            if unknown <= token_bits {
                each = filter.mass(value(
                    filter.largest - u32::cast_from(known >> (token_bits - unknown)),
                ));
            }
        }
        if left + each > found.through {
            // All of the bin are kept: the last place that has these bits will do.
            known = ((known + 1) << unknown) - 1;
            unknown = 0u64.runtime();
        }
        left -= found.before;
    }
    min(known, end)
}

/// p of a sum, rounded up. p is taken in steps of 2^-32.
#[cube]
fn fraction(sum: u64, p: f32) -> u64 {
    let p = u64::cast_from(p * 4_294_967_296.0f32);
    let low = (sum & 0xffff_ffffu64) * p + 0xffff_ffffu64;
    (sum >> 32) * p + (low >> 32)
}
