use super::{BLOCK, BROKEN, MASS_BITS, MIN_MIN_P, MIN_TEMPERATURE};
use crate::kernels::{SequenceState, SequenceStatus};
use std::f32::consts::{LN_2, LOG2_E};

/// Returns the bitmap of the tokens that occur in a prompt, in the format of
/// [`sample`](super::sample): bit `token % 32` of word `token / 32`. Tokens outside the vocabulary
/// are ignored.
pub fn bitmap(tokens: &[u32], vocab: usize) -> Vec<u32> {
    let mut words = vec![0; vocab.div_ceil(BLOCK)];
    for &token in tokens.iter().filter(|&&token| (token as usize) < vocab) {
        mark(&mut words, token);
    }
    words
}

/// Chooses a row's next token on the host, with the same token and new state as
/// [`sample`](super::sample).
///
/// `logits` are the row's logits, `token_bitmap` and `suppressed` are the bitmaps of its slot, and
/// `max_len` is the number of positions of the context window. A row that is not at a position does
/// not change. Tokens past the end of a bitmap count as tokens that did not occur, or are not
/// suppressed.
pub fn sample_host(
    logits: &[f32],
    row: &mut SequenceState,
    token_bitmap: &mut [u32],
    suppressed: &[u32],
    max_len: u32,
) {
    let SequenceStatus::At(position) = row.status else {
        return;
    };
    let suppressed = if row.suppresses { suppressed } else { &[] };
    let Some(token) = choose(logits, row, position, [token_bitmap, suppressed]) else {
        row.status = SequenceStatus::Failed;
        return;
    };
    mark(token_bitmap, token);
    row.token = token;
    row.status = if position + 1 < max_len {
        SequenceStatus::At(position + 1)
    } else {
        SequenceStatus::WindowFull
    };
}

fn mark(words: &mut [u32], token: u32) {
    if let Some(word) = words.get_mut(token as usize / BLOCK) {
        *word |= 1 << (token as usize % BLOCK);
    }
}

/// A token that can be chosen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub token: u32,
    pub logit: f32,
    key: u32,
}

fn choose(logits: &[f32], row: &SequenceState, position: u32, bitmaps: [&[u32]; 2]) -> Option<u32> {
    let mut candidates = candidates(logits, row.repetition_penalty, bitmaps)?;
    let greedy = row.temperature < MIN_TEMPERATURE || row.top_k == 1;
    if greedy {
        return largest(
            candidates
                .into_iter()
                .map(|candidate| (candidate.key, candidate.token)),
        );
    }
    if row.top_k > 0 || row.top_p < 1.0 || row.min_p >= MIN_MIN_P {
        filter(&mut candidates, row);
    }
    largest(
        candidates
            .into_iter()
            .map(|Candidate { token, logit, .. }| {
                let word = philox([token / 4, position, 0, 0], row.seed)[token as usize % 4];
                (key(logit / row.temperature + gumbel(word)), token)
            }),
    )
}

/// Returns the token of the largest key, and the lowest token of equal keys; `None` if no token can
/// be chosen.
fn largest(keys: impl Iterator<Item = (u32, u32)>) -> Option<u32> {
    let best = keys.max_by_key(|&(key, token)| (key, std::cmp::Reverse(token)));
    best.filter(|&(key, _)| key != 0 && key != BROKEN)
        .map(|(_, token)| token)
}

/// Returns the tokens that are not suppressed and whose logit is above minus infinity, with their
/// logits after the repetition penalty; `None` if a logit of a token that is not suppressed is NaN
/// or plus infinity.
pub(super) fn candidates(
    logits: &[f32],
    penalty: f32,
    [token_bitmap, suppressed]: [&[u32]; 2],
) -> Option<Vec<Candidate>> {
    let is_marked = |words: &[u32], token: usize| {
        words
            .get(token / BLOCK)
            .is_some_and(|word| word >> (token % BLOCK) & 1 == 1)
    };
    let mut candidates = Vec::with_capacity(logits.len());
    for (token, &logit) in logits
        .iter()
        .enumerate()
        .filter(|&(token, _)| !is_marked(suppressed, token))
    {
        let logit = match is_marked(token_bitmap, token) {
            true if logit > 0.0 => logit / penalty,
            true => logit * penalty,
            false => logit,
        };
        match key(logit) {
            BROKEN => return None,
            0 => {}
            key => candidates.push(Candidate {
                token: token as u32,
                logit,
                key,
            }),
        }
    }
    Some(candidates)
}

/// Keeps the tokens that top-k, then top-p and then min-p keep, in the order from the most likely
/// token to the least likely.
pub(super) fn filter(candidates: &mut Vec<Candidate>, row: &SequenceState) {
    candidates
        .sort_unstable_by_key(|candidate| (std::cmp::Reverse(candidate.key), candidate.token));
    if row.top_k > 0 {
        candidates.truncate(row.top_k as usize);
    }
    let Some(&Candidate { logit: largest, .. }) = candidates.first() else {
        return;
    };
    if row.top_p < 1.0 {
        let mass =
            |candidate: &Candidate| mass((candidate.logit - largest) * (1.0 / row.temperature));
        let target = fraction(candidates.iter().map(mass).sum(), row.top_p);
        let mut sum = 0;
        let kept = candidates.iter().take_while(|candidate| {
            let below = sum < target;
            sum += mass(candidate);
            below
        });
        let kept = kept.count().max(1);
        candidates.truncate(kept);
    }
    if row.min_p >= MIN_MIN_P {
        let least = key(row.temperature.mul_add(ln(row.min_p), largest));
        candidates.retain(|candidate| candidate.key >= least);
    }
}

// The functions below are those of `noise.rs`, and `fraction` of `filter.rs`, in Rust, operation by
// operation.

fn key(value: f32) -> u32 {
    let bits = value.to_bits();
    if value.is_nan() || value == f32::INFINITY {
        BROKEN
    } else if value == f32::NEG_INFINITY {
        0
    } else if value == 0.0 {
        1 << 31
    } else if value < 0.0 {
        !bits
    } else {
        bits | 1 << 31
    }
}

fn philox(mut counter: [u32; 4], seed: u32) -> [u32; 4] {
    let mut key = [seed, 0u32];
    for _ in 0..10 {
        let [first, second] = [(0xd251_1f53, counter[0]), (0xcd9e_8d57, counter[2])]
            .map(|(a, b): (u32, u32)| u64::from(a) * u64::from(b));
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [
            key[0].wrapping_add(0x9e37_79b9),
            key[1].wrapping_add(0xbb67_ae85),
        ];
    }
    counter
}

fn gumbel(word: u32) -> f32 {
    let rest = ((word as f32 + 0.5) * 2f32.powi(-32)).min(1.0 - 2f32.powi(-24));
    let u = 1.0 - rest;
    let exponential = if u < 1.0 {
        -ln(u) * (rest / (1.0 - u))
    } else {
        rest
    };
    -ln(exponential)
}

fn ln(x: f32) -> f32 {
    let bits = x.to_bits() as i32;
    let exponent = (bits - 0x3f35_04f3) >> 23;
    let m = f32::from_bits((bits - (exponent << 23)) as u32);
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let sum = [1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0]
        .into_iter()
        .fold(1.0 / 9.0, |sum: f32, term| z.mul_add(sum, term));
    (exponent as f32).mul_add(LN_2, (s + s) * sum)
}

fn mass(x: f32) -> u64 {
    if x <= -29.0 {
        return 0;
    }
    let n = x.mul_add(LOG2_E, 0.5).floor();
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-0.693_359_4, x));
    let terms = [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let sum = terms
        .into_iter()
        .fold(1.0 / 5040.0, |sum: f32, term| r.mul_add(sum, term));
    (sum * 2f32.powi(n as i32 + MASS_BITS)) as u64
}

fn fraction(sum: u64, p: f32) -> u64 {
    let p = u128::from((p * 2f32.powi(32)) as u64);
    ((u128::from(sum) * p).div_ceil(1 << 32)) as u64
}

#[cfg(test)]
mod tests;
