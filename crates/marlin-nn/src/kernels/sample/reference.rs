use super::token_table::{SlotTokens, is_marked, mark};
use super::{BROKEN, LOGPROB_WORDS, MASS_BITS, MIN_MIN_P, MIN_TEMPERATURE};
use crate::kernels::{SequenceState, SequenceStatus};
use std::f32::consts::{LN_2, LOG2_E};

/// Chooses a row's next token on the host, with the same token and new state as
/// [`sample`](super::sample).
///
/// `logits` are the row's logits, `tokens` is the data of its slot, and `max_len` is the number of
/// positions of the context window. A row that is not at a position does not change. Tokens past
/// the end of a bitmap count as tokens that did not occur, or are not suppressed.
pub fn sample_host(
    logits: &[f32],
    row: &mut SequenceState,
    tokens: &mut SlotTokens<'_>,
    max_len: u32,
) {
    let SequenceStatus::At(position) = row.status else {
        return;
    };
    let Some(token) = choose(logits, row, position, tokens) else {
        row.status = SequenceStatus::Failed;
        return;
    };
    mark(tokens.occurred, token);
    if row.is_biased {
        tokens.generate(token, row.presence_penalty, row.frequency_penalty);
    }
    row.token = token;
    row.status = if position + 1 < max_len {
        SequenceStatus::At(position + 1)
    } else {
        SequenceStatus::WindowFull
    };
}

/// A token that can be chosen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub token: u32,
    pub logit: f32,
    key: u32,
}

fn choose(
    logits: &[f32],
    row: &SequenceState,
    position: u32,
    tokens: &SlotTokens<'_>,
) -> Option<u32> {
    let mut candidates = candidates(logits, row, tokens)?;
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
/// logits after the repetition penalty and the biases; `None` if a logit of a token that is not
/// suppressed is NaN or plus infinity.
pub(super) fn candidates(
    logits: &[f32],
    row: &SequenceState,
    tokens: &SlotTokens<'_>,
) -> Option<Vec<Candidate>> {
    let mut candidates = Vec::with_capacity(logits.len());
    for (token, &logit) in (0..).zip(logits) {
        if row.suppresses && is_marked(tokens.suppressed, token) {
            continue;
        }
        let penalty = row.repetition_penalty;
        let mut logit = match is_marked(tokens.occurred, token) {
            true if logit > 0.0 => logit / penalty,
            true => logit * penalty,
            false => logit,
        };
        if row.is_biased {
            let bias = tokens.biases.get(token as usize);
            logit += bias.map_or(0.0, |&bias| f32::from_bits(bias));
        }
        match key(logit) {
            BROKEN => return None,
            0 => {}
            key => candidates.push(Candidate { token, logit, key }),
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

/// Returns the log probability of a row's chosen token under its logits, then the most likely
/// tokens with their log probabilities, the most likely first: the words that
/// [`logprobs`](super::logprobs) writes. Of equal logits, the lower token comes first. `count` is
/// at most [`MAX_LOGPROBS`](super::MAX_LOGPROBS).
pub fn logprobs_host(logits: &[f32], token: u32, count: usize) -> [u32; LOGPROB_WORDS] {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = logits.iter().map(|logit| (logit - largest).exp()).sum();
    let logprob = |logit: f32| (logit - largest - sum.ln()).to_bits();
    let mut words = [0; LOGPROB_WORDS];
    words[0] = logits
        .get(token as usize)
        .map_or(0, |&logit| logprob(logit));
    let mut order: Vec<(u32, u32)> = logits.iter().map(|&logit| key(logit)).zip(0..).collect();
    order.sort_unstable_by_key(|&(key, token)| (std::cmp::Reverse(key), token));
    let (pairs, _) = words[1..].as_chunks_mut();
    for (pair, (_, token)) in pairs.iter_mut().zip(order).take(count) {
        *pair = [token, logprob(logits[token as usize])];
    }
    words
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
