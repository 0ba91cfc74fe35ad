use super::filter::{Filter, SamplingLimits, Shortlist, last_kept};
use super::floats::{Floats, SharedValues};
use super::logits::Logits;
use super::noise::{gumbel, key, philox};
use super::token_table::TokenTable;
use super::{BLOCK, BROKEN, CHUNK, CHUNK_BLOCKS, MIN_MIN_P, MIN_TEMPERATURE, RECORD};
use crate::kernels::{SequenceState, SequenceStatus};
use cubecl::prelude::*;
use marlin_kernels::pdl::launch_dependents_and_wait;

/// The sizes of a problem as the kernels see them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct SampleSizes {
    /// The number of logits of a row.
    pub vocab: u32,
    /// The number of chunks of a row.
    pub chunks: u32,
    /// The number of words of a row of the token table: vocab / 32, rounded up.
    pub words: u32,
    /// The number of positions of the context window.
    pub max_len: u32,
}

/// The sampling options of a row of the state.
#[derive(CubeType, Clone, Copy)]
struct Options {
    /// The position of the row's token; negative if the row is skipped.
    position: i32,
    seed: u32,
    temperature: f32,
    kept: SamplingLimits,
    logits: Logits,
    /// True if the most likely token is chosen.
    greedy: bool,
    presence_penalty: f32,
    frequency_penalty: f32,
    /// True if top-k, top-p or min-p may exclude tokens.
    filtered: bool,
}

#[cube]
fn options(state: &[i32], row: u32, sizes: &SampleSizes, #[comptime] is_shader: bool) -> Options {
    let words = row as usize * comptime!(SequenceState::WORDS);
    let top_k = u32::reinterpret(state[words + comptime!(SequenceState::TOP_K)]);
    let temperature = f32::reinterpret(state[words + comptime!(SequenceState::TEMPERATURE)]);
    let top_p = f32::reinterpret(state[words + comptime!(SequenceState::TOP_P)]);
    let min_p = f32::reinterpret(state[words + comptime!(SequenceState::MIN_P)]);
    let table = u32::reinterpret(state[words + comptime!(SequenceState::SLOT)])
        * comptime!(TokenTable::ROWS as u32);
    let greedy = temperature < MIN_TEMPERATURE || top_k == 1;
    Options {
        position: state[words + comptime!(SequenceState::POSITION)],
        seed: u32::reinterpret(state[words + comptime!(SequenceState::SEED)]),
        temperature,
        kept: SamplingLimits {
            top_k,
            top_p,
            min_p,
        },
        logits: Logits {
            first: row * sizes.vocab,
            vocab: sizes.vocab,
            occurred: (table + comptime!(TokenTable::OCCURRED as u32)) * sizes.words,
            suppressed: (table + comptime!(TokenTable::SUPPRESSED as u32)) * sizes.words,
            suppresses: state[words + comptime!(SequenceState::SUPPRESSES)] != 0,
            generated: (table + comptime!(TokenTable::GENERATED as u32)) * sizes.words,
            biases: (table + comptime!(TokenTable::BIASES as u32)) * sizes.words,
            is_biased: state[words + comptime!(SequenceState::IS_BIASED)] != 0,
            penalty: f32::reinterpret(state[words + comptime!(SequenceState::REPETITION_PENALTY)]),
            // The shift gives 0, because a vocabulary has far fewer than 2^31 tokens.
            floats: Floats {
                zero: sizes.vocab >> 31,
                is_shader,
            },
        },
        greedy,
        presence_penalty: f32::reinterpret(
            state[words + comptime!(SequenceState::PRESENCE_PENALTY)],
        ),
        frequency_penalty: f32::reinterpret(
            state[words + comptime!(SequenceState::FREQUENCY_PENALTY)],
        ),
        filtered: !greedy
            && ((top_k > 0 && top_k < sizes.vocab) || top_p < 1.0f32 || min_p >= MIN_MIN_P),
    }
}

/// Writes a chunk's record: [key, token] of its best token, then, if the row is filtered, the
/// largest key of each of its blocks. One cube processes one chunk of a row.
///
/// The key is that of the score, or of the logit if the row is greedy or filtered. The key is 0 if
/// no token can be chosen, and [`BROKEN`] if a logit is NaN or plus infinity.
#[cube(launch)]
pub(super) fn score<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    state: &[i32],
    token_table: &[u32],
    records: &mut [u32],
    sizes: SampleSizes,
    #[comptime] lanes: usize,
    #[comptime] units: usize,
    #[comptime] is_shader: bool,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let row = CUBE_POS_X / sizes.chunks;
    let chunk = CUBE_POS_X % sizes.chunks;
    let options = options(state, row, &sizes, is_shader);
    if options.position < 0 {
        terminate!();
    }
    let fours = comptime!(CHUNK / 4);
    let mut best = SharedValues::new(fours, is_shader);
    // On the CPU, cubes share this memory, and a unit starts the next cube while other units still
    // process the previous cube.
    sync_cube();

    let random = !options.greedy && !options.filtered;
    let mut words = Array::<u32>::new(4usize);
    for turn in 0..comptime!(fours / units) {
        let i = turn * units + UNIT_POS_X as usize;
        let token = chunk * comptime!(CHUNK as u32) + i as u32 * 4;
        let four = options
            .logits
            .four::<F, N>(logits, token_table, token, lanes);
        if random {
            philox(&mut words, token / 4, options.position as u32, options.seed);
        }
        let mut first = 0u64.runtime();
        #[unroll]
        for j in 0..4usize {
            let mut score = four.extract(j);
            if random {
                score = options.logits.floats.divide(score, options.temperature)
                    + gumbel(words[j], &options.logits.floats);
            }
            first = max(first, ranked(key(score), token + comptime!(j as u32)));
        }
        best.set(i, first);
    }

    #[unroll]
    for step in 0..comptime!(fours.ilog2()) {
        let distance = comptime!(1usize << step);
        sync_cube();
        if comptime!(distance == BLOCK / 4) && options.filtered {
            let mut block = UNIT_POS_X as usize;
            while block < CHUNK_BLOCKS {
                records[CUBE_POS_X as usize * RECORD + 2 + block] =
                    u32::cast_from(best.get(block * distance) >> 32);
                block += units;
            }
            sync_cube();
        }
        let mut i = UNIT_POS_X as usize * comptime!(2 * distance);
        while i < fours {
            best.set(i, max(best.get(i), best.get(i + distance)));
            i += comptime!(2 * distance * units);
        }
    }
    if UNIT_POS_X == 0 {
        records[CUBE_POS_X as usize * RECORD] = u32::cast_from(best.get(0usize) >> 32);
        records[CUBE_POS_X as usize * RECORD + 1] = !u32::cast_from(best.get(0usize));
    }
}

/// Chooses a row's token and writes the row's new state. One cube processes one row.
#[cube(launch)]
pub(super) fn choose<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    state: &mut [i32],
    token_table: &mut [u32],
    records: &[u32],
    sizes: SampleSizes,
    #[comptime] lanes: usize,
    #[comptime] units: usize,
    #[comptime] blocks: usize,
    #[comptime] is_shader: bool,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let row = CUBE_POS_X;
    let options = options(&*state, row, &sizes, is_shader);
    if options.position < 0 {
        terminate!();
    }
    let (occurred, is_biased) = (options.logits.occurred, options.logits.is_biased);
    let (generated, biases) = (options.logits.generated, options.logits.biases);
    let mut sums = SharedValues::new(comptime!(2 * units), is_shader);
    // On the CPU, cubes share this memory, as in `score`.
    sync_cube();

    let mut best = 0u64.runtime();
    let mut chunk = UNIT_POS_X;
    while chunk < sizes.chunks {
        let record = (row * sizes.chunks + chunk) as usize * RECORD;
        best = max(best, ranked(records[record], records[record + 1]));
        chunk += comptime!(units as u32);
    }
    best = largest(best, &mut sums, units);

    let key_of_best = u32::cast_from(best >> 32);
    if options.filtered && key_of_best != 0 && key_of_best != BROKEN {
        let inverse_temperature = options.logits.floats.divide(1.0f32, options.temperature);
        let filter = Filter {
            logits: options.logits,
            temperature: options.temperature,
            inverse_temperature,
            largest: key_of_best,
            record: row * sizes.chunks,
            blocks: sizes.chunks * comptime!(CHUNK_BLOCKS as u32),
        };
        let mut shortlist = Shortlist::new(blocks, is_shader);
        let last = last_kept::<F, N>(
            &filter,
            &options.kept,
            logits,
            &*token_table,
            records,
            &mut shortlist,
            &mut sums,
            lanes,
            units,
        );

        best = 0u64.runtime();
        let mut words = Array::<u32>::new(4usize);
        let mut i = UNIT_POS_X;
        while i < shortlist.fours() {
            let token = shortlist.token(i);
            let four = filter
                .logits
                .four::<F, N>(logits, &*token_table, token, lanes);
            philox(&mut words, token / 4, options.position as u32, options.seed);
            #[unroll]
            for j in 0..4usize {
                let token = token + comptime!(j as u32);
                if filter.place(four.extract(j), token) <= last {
                    let floats = &filter.logits.floats;
                    let score = floats.divide(four.extract(j), options.temperature)
                        + gumbel(words[j], floats);
                    best = max(best, ranked(key(score), token));
                }
            }
            i += comptime!(units as u32);
        }
        best = largest(best, &mut sums, units);
    }

    if UNIT_POS_X == 0 {
        let words = row as usize * comptime!(SequenceState::WORDS);
        let key = u32::cast_from(best >> 32);
        let mut position = comptime!(SequenceStatus::FAILED).runtime();
        if key != 0 && key != BROKEN {
            let token = !u32::cast_from(best);
            state[words + comptime!(SequenceState::TOKEN)] = i32::cast_from(token);
            let bit = 1u32 << (token % 32);
            token_table[(occurred + token / 32) as usize] |= bit;
            if is_biased {
                let bias = (biases + token) as usize;
                let word = (generated + token / 32) as usize;
                let mut penalised = f32::reinterpret(token_table[bias]) - options.frequency_penalty;
                if token_table[word] & bit == 0 {
                    penalised -= options.presence_penalty;
                }
                token_table[word] |= bit;
                token_table[bias] = u32::reinterpret(penalised);
            }
            position = options.position + 1;
            if position as u32 >= sizes.max_len {
                position = comptime!(SequenceStatus::WINDOW_FULL).runtime();
            }
        }
        state[words + comptime!(SequenceState::POSITION)] = position;
    }
}

/// Returns a key and a token as one integer. A larger key gives a larger integer, and so does the
/// lower token of equal keys.
#[cube]
pub(super) fn ranked(key: u32, token: u32) -> u64 {
    (u64::cast_from(key) << 32) | u64::cast_from(!token)
}

/// Returns the largest value of a cube's units.
#[cube]
pub(super) fn largest(value: u64, shared: &mut SharedValues, #[comptime] units: usize) -> u64 {
    let unit = UNIT_POS_X as usize;
    shared.set(unit, value);
    sync_cube();
    let mut half = comptime!(units / 2).runtime();
    while half > 0 {
        if unit < half {
            shared.set(unit, max(shared.get(unit), shared.get(unit + half)));
        }
        sync_cube();
        half /= 2;
    }
    let largest = shared.get(0usize);
    sync_cube();
    largest
}
