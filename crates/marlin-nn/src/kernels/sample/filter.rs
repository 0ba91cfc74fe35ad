//! Top-k, top-p and min-p: the search for the last token that they keep, in the order from the most
//! likely token to the least likely.
//!
//! The *place* of a token is its rank in this order, as one integer: the high bits are the distance
//! of the key of its logit from the largest key, and the low bits are the token. A token has a
//! weight: 1 for top-k, and for top-p its probability as an integer, its *mass*. The last token
//! kept is the first token at which the cumulative weight reaches k, or p times the total mass. The
//! search finds some bits of the place of this token in each turn. It sums the weights of tokens by
//! these bits, and finds the bits at which the cumulative sum reaches the target. The next turn
//! continues with the next bits, among the tokens that have the bits found so far. Sums of integers
//! are the same in any order. Min-p depends only on the largest logit: a probability of at least p
//! times the largest probability is a logit of at least the largest logit + temperature * ln p.
//!
//! Blocks of tokens that cannot contain kept tokens are skipped, so the shortlist of most rows has
//! few blocks. For top-k, the k blocks with the most likely best tokens have at least k tokens that
//! are at least as likely as the least likely of these best tokens. A block whose best token is
//! less likely is skipped. For top-p, the least likely tokens, whose probabilities add up to less
//! than 1 - p, are past the last token kept.

use super::bins::{BINS, Bins, DIGIT_BITS, FOUND, prefix_sum};
use super::floats::{SharedValues, SharedWords};
use super::logits::Logits;
use super::noise::{key, ln, mass, value};
use super::{BLOCK, BROKEN, CHUNK_BLOCKS, MASS_BITS, MIN_MIN_P, RECORD, TOKEN_BITS};
use cubecl::prelude::*;

/// Returns the number of bytes of shared memory that the search takes with a shortlist of `blocks`
/// blocks.
pub(super) const fn shared_bytes(blocks: usize) -> usize {
    size_of::<u32>() * (blocks + 2 + 3 * BINS) + size_of::<u64>() * FOUND
}

/// The place of a token that is never chosen.
const NOWHERE: u64 = u64::MAX;

/// The limits of a row's top-k, top-p and min-p.
#[derive(CubeType, Clone, Copy)]
pub(super) struct SamplingLimits {
    /// The number of tokens that top-k keeps; 0 for all tokens.
    pub top_k: u32,
    /// The probability that top-p keeps; 1 for all tokens.
    pub top_p: f32,
    /// The probability, relative to the most likely token's, from which on min-p keeps tokens;
    /// below [`MIN_MIN_P`] for all tokens.
    pub min_p: f32,
}

/// The data of a row that top-k, top-p and min-p need.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Filter {
    pub logits: Logits,
    pub temperature: f32,
    /// The reciprocal of the temperature.
    pub inverse_temperature: f32,
    /// The key of the row's largest logit.
    pub largest: u32,
    /// The index of the row's first record.
    pub record: u32,
    /// The number of blocks whose keys are in the row's records.
    pub blocks: u32,
}

/// A list of the blocks of 32 tokens that may contain kept tokens, in any order.
#[derive(CubeType)]
pub(super) struct Shortlist {
    blocks: SharedWords,
    length: Shared<[Atomic<u32>]>,
}

#[cube]
impl Shortlist {
    /// Allocates a shortlist for up to `blocks` blocks.
    pub fn new(#[comptime] blocks: usize, #[comptime] is_shader: bool) -> Self {
        Shortlist {
            blocks: SharedWords::new(blocks, is_shader),
            length: Shared::<[Atomic<u32>]>::new_slice(1usize),
        }
    }

    /// Returns the number of runs of four tokens.
    pub fn fours(&self) -> u32 {
        self.length[0].load() * comptime!(BLOCK as u32 / 4)
    }

    /// Returns the first token of run `four` of four tokens.
    pub fn token(&self, four: u32) -> u32 {
        let fours = comptime!(BLOCK as u32 / 4);
        self.blocks.get((four / fours) as usize) * comptime!(BLOCK as u32) + four % fours * 4
    }
}

#[cube]
impl Filter {
    /// Returns the place of a token in the order from the most likely token to the least likely;
    /// [`NOWHERE`] if the token is never chosen.
    pub fn place(&self, logit: f32, token: u32) -> u64 {
        let key = key(logit);
        let mut place = NOWHERE.runtime();
        if key != 0 && key != BROKEN {
            place = (u64::cast_from(self.largest - key) << comptime!(TOKEN_BITS as u64))
                | u64::cast_from(token);
        }
        place
    }

    /// Returns the mass of a token: its probability divided by that of the most likely token, as an
    /// integer.
    fn mass(&self, logit: f32) -> u64 {
        let floats = &self.logits.floats;
        mass(floats.rounded(floats.rounded(logit - value(self.largest)) * self.inverse_temperature))
    }

    /// Returns the largest key of a block; 0 if none of its tokens can be chosen.
    fn block(&self, records: &[u32], block: u32) -> u32 {
        let chunk_blocks = comptime!(CHUNK_BLOCKS as u32);
        records[(self.record + block / chunk_blocks) as usize * RECORD
            + 2
            + (block % chunk_blocks) as usize]
    }

    /// Returns an upper bound of the distance of the `k` most likely tokens' keys from the largest
    /// key, computed only from the keys of blocks.
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
        // The bits that are unknown after two turns hardly change the bound.
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

    /// Returns an upper bound of the distance of the kept tokens' keys from the largest key. The
    /// tokens past the last token kept have a mass of `rest`.
    fn span_of_rest(&self, rest: u64) -> u32 {
        // All tokens with less mass than `least` have together less mass than `rest`. The division
        // by 2 leaves room for rounding.
        let least = max(rest / u64::cast_from(self.logits.vocab) / 2, 1u64.runtime());
        let largest = value(self.largest);
        let depth = comptime!(MASS_BITS as f32 * core::f32::consts::LN_2).runtime()
            - ln(f32::cast_from(least), &self.logits.floats);
        let margin = max(largest, -largest) * 1e-6f32;
        self.largest - key(largest - depth * self.temperature - margin)
    }

    /// Returns the distance of the last key that min-p keeps from the largest key.
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

    /// Fills the shortlist with the blocks whose largest key is at most `span` below the row's
    /// largest key.
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

/// Returns the last place of a token whose key is at most `span` below the largest key.
#[cube]
fn last_within(span: u32) -> u64 {
    ((u64::cast_from(span) + 1) << comptime!(TOKEN_BITS as u64)) - 1
}

/// Returns the place of the last token that top-k, then top-p and then min-p keep. Afterwards, the
/// shortlist contains all tokens up to this place.
#[cube]
pub(super) fn last_kept<F: Float, N: Size>(
    filter: &Filter,
    kept: &SamplingLimits,
    logits: &[Vector<F, N>],
    token_table: &[u32],
    records: &[u32],
    shortlist: &mut Shortlist,
    sums: &mut SharedValues,
    #[comptime] lanes: usize,
    #[comptime] units: usize,
) -> u64 {
    let mut bins = Bins::new(filter.logits.floats.is_shader);
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
            token_table,
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
            let four = filter
                .logits
                .four::<F, N>(logits, token_table, token, lanes);
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
            token_table,
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

/// Returns the place of the first token at which the cumulative weight reaches `target`: a number
/// of tokens, or a mass. Tokens past `end`, or more than `span` below the largest key, are ignored.
#[cube]
fn reach<F: Float, N: Size>(
    filter: &Filter,
    target: u64,
    span: u32,
    end: u64,
    logits: &[Vector<F, N>],
    token_table: &[u32],
    shortlist: &Shortlist,
    bins: &mut Bins,
    sums: &mut SharedValues,
    #[comptime] by_mass: bool,
    #[comptime] lanes: usize,
    #[comptime] units: usize,
) -> u64 {
    let token_bits = comptime!(TOKEN_BITS as u64);
    let end = min(end, last_within(span));
    // The known bits of the place, the number of unknown bits, and the remaining target among
    // places with the known bits.
    let mut known = 0u64.runtime();
    let mut unknown = u64::cast_from(32 - span.leading_zeros()) + token_bits;
    let mut left = target;
    while unknown > 0 {
        // No turn covers both bits of the key and bits of the token.
        let mut shift = max(unknown, comptime!(DIGIT_BITS as u64)) - comptime!(DIGIT_BITS as u64);
        if unknown > token_bits {
            shift = max(shift, token_bits);
        }
        bins.clear(units);
        let mut i = UNIT_POS_X;
        while i < shortlist.fours() {
            let token = shortlist.token(i);
            let four = filter
                .logits
                .four::<F, N>(logits, token_table, token, lanes);
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

        // The weight of each token of the bin, if it is the same for all tokens; otherwise 0.
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
            // All tokens of the bin are kept, so the result is the last place that has these bits.
            known = ((known + 1) << unknown) - 1;
            unknown = 0u64.runtime();
        }
        left -= found.before;
    }
    min(known, end)
}

/// Returns `p` times `sum`, rounded up. `p` is truncated to a multiple of 2^-32.
#[cube]
fn fraction(sum: u64, p: f32) -> u64 {
    let p = u64::cast_from(p * 4_294_967_296.0f32);
    let low = (sum & 0xffff_ffffu64) * p + 0xffff_ffffu64;
    (sum >> 32) * p + (low >> 32)
}
