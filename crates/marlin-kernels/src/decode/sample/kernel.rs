use super::filter::{Filter, last_kept};
use super::noise::{gumbel, key, philox};
use super::{BLOCK, BROKEN, MIN_TEMPERATURE};
use crate::decode::{Row, RowState};
use cubecl::prelude::*;

/// Lengths as the kernels see them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Lengths {
    /// Rows of logits.
    pub rows: u32,
    /// Logits of a row.
    pub vocab: u32,
    /// Blocks of a row, and words of a slot's bitmap: vocab / 32, rounded up.
    pub blocks: u32,
    /// Positions of the window.
    pub max_len: u32,
}

/// What a row of the state says.
#[derive(CubeType, Clone, Copy)]
struct Options {
    /// Negative where the row is skipped.
    position: i32,
    seed: u32,
    /// 0 where all tokens count.
    top_k: u32,
    temperature: f32,
    top_p: f32,
    penalty: f32,
    /// The first word of the slot's bitmap.
    seen: u32,
    /// The most likely token is chosen.
    greedy: bool,
    /// Top-k or top-p leave tokens out.
    filtered: bool,
}

#[cube]
fn options(state: &[i32], row: u32, lengths: &Lengths) -> Options {
    let words = row as usize * comptime!(Row::WORDS);
    let top_k = u32::reinterpret(state[words + comptime!(Row::TOP_K)]);
    let temperature = f32::reinterpret(state[words + comptime!(Row::TEMPERATURE)]);
    let top_p = f32::reinterpret(state[words + comptime!(Row::TOP_P)]);
    let greedy = temperature < MIN_TEMPERATURE || top_k == 1;
    Options {
        position: state[words + comptime!(Row::POSITION)],
        seed: u32::reinterpret(state[words + comptime!(Row::SEED)]),
        top_k,
        temperature,
        top_p,
        penalty: f32::reinterpret(state[words + comptime!(Row::REPETITION_PENALTY)]),
        seen: u32::reinterpret(state[words + comptime!(Row::SLOT)]) * lengths.blocks,
        greedy,
        filtered: !greedy && ((top_k > 0 && top_k < lengths.vocab) || top_p < 1.0f32),
    }
}

/// A logit after the repetition penalty; bit `token % 32` of the word says whether the token occurred.
#[cube]
pub(super) fn penalised<F: Float>(logit: F, token: u32, word: u32, penalty: f32) -> f32 {
    let mut logit = f32::cast_from(logit);
    if (word >> (token % 32)) & 1 == 1 {
        if logit > 0.0f32 {
            logit /= penalty;
        } else {
            logit *= penalty;
        }
    }
    logit
}

/// Writes [key, token] of the best token of each block to `best` [rows, blocks, 2]. One unit a block.
///
/// The key is of the score, or of the logit where the row is greedy or filtered; it is 0 where no token can be chosen, [`BROKEN`] where a
/// logit is.
#[cube(launch)]
pub(super) fn score<F: Float>(
    logits: &[F],
    state: &[i32],
    seen: &[u32],
    best: &mut [u32],
    lengths: Lengths,
    #[define(F)] _dtype: ElemType,
) {
    let unit = ABSOLUTE_POS as u32;
    let row = unit / lengths.blocks;
    if row >= lengths.rows {
        terminate!();
    }
    let options = options(state, row, &lengths);
    if options.position < 0 {
        terminate!();
    }
    let block = unit % lengths.blocks;
    let word = seen[(options.seen + block) as usize];
    let random = !options.greedy && !options.filtered;

    let mut words = Array::<u32>::new(4usize);
    let mut best_key = 0u32.runtime();
    let mut best_token = 0u32.runtime();
    for four in 0..comptime!(BLOCK as u32 / 4) {
        let first = block * comptime!(BLOCK as u32) + four * 4;
        if random {
            philox(&mut words, first / 4, options.position as u32, options.seed);
        }
        #[unroll]
        for i in 0..4u32 {
            let token = first + i;
            if token < lengths.vocab {
                let mut score = penalised::<F>(logits[(row * lengths.vocab + token) as usize], token, word, options.penalty);
                if random {
                    score = score / options.temperature + gumbel(words[i as usize]);
                }
                let key = key(score);
                if key > best_key {
                    best_key = key;
                    best_token = token;
                }
            }
        }
    }
    best[(unit * 2) as usize] = best_key;
    best[(unit * 2 + 1) as usize] = best_token;
}

/// Chooses a row's token and writes its new state. One cube a row.
#[cube(launch)]
pub(super) fn choose<F: Float>(
    logits: &[F],
    state: &mut [i32],
    seen: &mut [u32],
    best: &[u32],
    lengths: Lengths,
    #[comptime] units: usize,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS_X;
    let options = options(&*state, row, &lengths);
    if options.position < 0 {
        terminate!();
    }
    let mut shared = Shared::<[u64]>::new_slice(units);
    // On the CPU cubes share this memory, and a unit goes on to the next cube while others are at the last.
    sync_cube();

    let mut first = 0u64.runtime();
    let mut block = UNIT_POS_X;
    while block < lengths.blocks {
        let index = ((row * lengths.blocks + block) * 2) as usize;
        first = max(first, ranked(best[index], best[index + 1]));
        block += comptime!(units as u32);
    }
    first = largest(first, &mut shared, units);

    let largest_key = u32::cast_from(first >> 32);
    if options.filtered && largest_key != 0 && largest_key != BROKEN {
        let filter = Filter {
            first: row * lengths.vocab,
            vocab: lengths.vocab,
            seen: options.seen,
            penalty: options.penalty,
            temperature: options.temperature,
            largest: largest_key,
        };
        let last = last_kept::<F>(&filter, options.top_k, options.top_p, logits, &*seen, &mut shared, units);
        first = 0u64.runtime();
        let mut words = Array::<u32>::new(4usize);
        let mut token = UNIT_POS_X;
        while token < lengths.vocab {
            let logit = filter.logit::<F>(logits, &*seen, token);
            if filter.place(logit, token) <= last {
                philox(&mut words, token / 4, options.position as u32, options.seed);
                let i = token % 4;
                let word = select(i < 2, select(i == 0, words[0], words[1]), select(i == 2, words[2], words[3]));
                first = max(first, ranked(key(logit / options.temperature + gumbel(word)), token));
            }
            token += comptime!(units as u32);
        }
        first = largest(first, &mut shared, units);
    }

    if UNIT_POS_X == 0 {
        let words = row as usize * comptime!(Row::WORDS);
        let key = u32::cast_from(first >> 32);
        let mut position = comptime!(RowState::FAILED).runtime();
        if key != 0 && key != BROKEN {
            let token = !u32::cast_from(first);
            state[words + comptime!(Row::TOKEN)] = i32::cast_from(token);
            let word = (options.seen + token / 32) as usize;
            seen[word] |= 1u32 << (token % 32);
            position = options.position + 1;
            if position as u32 >= lengths.max_len {
                position = comptime!(RowState::WINDOW_FULL).runtime();
            }
        }
        state[words + comptime!(Row::POSITION)] = position;
    }
}

/// A key and a token in one: larger is better, and of equal keys the lower token.
#[cube]
fn ranked(key: u32, token: u32) -> u64 {
    (u64::cast_from(key) << 32) | u64::cast_from(!token)
}

/// The largest value of a cube's units.
#[cube]
fn largest(value: u64, shared: &mut Shared<[u64]>, #[comptime] units: usize) -> u64 {
    let unit = UNIT_POS_X as usize;
    shared[unit] = value;
    sync_cube();
    let mut half = comptime!(units / 2).runtime();
    while half > 0 {
        if unit < half {
            shared[unit] = max(shared[unit], shared[unit + half]);
        }
        sync_cube();
        half /= 2;
    }
    let largest = shared[0];
    sync_cube();
    largest
}
