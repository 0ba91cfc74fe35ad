use crate::tile::floats::shifted;
use cubecl::prelude::*;
use marlin_format::WeightValue;
use marlin_format::layout::{MetadataLayout, bit_moves};

/// The number of columns of a tile of [`MarlinLayout`](marlin_format::layout::MarlinLayout).
const TILE_N: u32 = 64;
/// The number of words of a tile.
const TILE_WORDS: u32 = 128;

/// Converts words of the plain layout to words of the tile layout; see
/// [`MarlinLayout`](marlin_format::layout::MarlinLayout) for the contents of a word.
///
/// With 4 bits, the eight weights of a word are pairs of rows from four plain words: rows `2t` and
/// `2t + 1` of rows 0 to 7 and of rows 8 to 15, in two columns. With 8 bits, the four weights of a
/// word are one pair of rows, half of a plain word, in two columns; those of a word of e4m3 are two
/// pairs of rows, 8 rows apart, in one column.
#[cube(launch)]
pub(super) fn words(
    plain: &[u32],
    out: &mut [u32],
    plain_rows: u32,
    plain_columns: u32,
    tiles_n: u32,
    #[comptime] value: WeightValue,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let index = ABSOLUTE_POS as u32;
    let tile = index / TILE_WORDS;
    let lane = index % TILE_WORDS / 4;
    let column = tile % tiles_n * TILE_N + index % 4 * 16 + lane / 4;
    let row = tile / tiles_n * 2;

    let mut word = 0u32.runtime();
    let padding = comptime!(value.padding_word());
    if comptime!(value.bits() == 4) {
        let shift = lane % 4 * 8;
        #[unroll]
        for pair in 0..4u32 {
            // Pairs 0 and 1 are in rows 0 to 7 of the first and of the second column, pairs 2 and 3
            // in rows 8 to 15.
            let row = row + comptime!(pair / 2);
            let column = column + comptime!(pair % 2 * 8);
            // Beyond the padding of the plain layout, every value is padding, too.
            let mut two = comptime!(padding & 0xff).runtime();
            if row < plain_rows && column < plain_columns {
                two = plain[(row * plain_columns + column) as usize] >> shift;
            }
            word |= ((two & 15u32) << comptime!(4 * pair))
                | (((two >> 4u32) & 15u32) << comptime!(4 * pair + 16));
        }
    } else if comptime!(value == WeightValue::E4m3) {
        let column = column + tile / tiles_n % 2 * 8;
        let row = row / 4 * 4 + lane % 4 / 2;
        let shift = lane % 2 * 16;
        #[unroll]
        for pair in 0..2u32 {
            let row = row + comptime!(2 * pair);
            let mut two = comptime!(padding & 0xffff).runtime();
            if row < plain_rows && column < plain_columns {
                two = (plain[(row * plain_columns + column) as usize] >> shift) & 0xffffu32;
            }
            // The first pair is in bytes 0 and 2, the second one in bytes 1 and 3.
            word |= ((two & 255u32) | (two >> 8u32) << 16u32) << comptime!(8 * pair);
        }
    } else {
        let row = row + lane % 4 / 2;
        let shift = lane % 2 * 16;
        #[unroll]
        for pair in 0..2u32 {
            let column = column + comptime!(pair * 8);
            let mut two = comptime!(padding & 0xffff).runtime();
            if row < plain_rows && column < plain_columns {
                two = (plain[(row * plain_columns + column) as usize] >> shift) & 0xffffu32;
            }
            word |= two << comptime!(16 * pair);
        }
    }
    word = scattered(word, value);
    out[ABSOLUTE_POS] = word;
}

/// Moves the bits of the values of a word to their order in the tile layout
/// ([`scatter_bits`](marlin_format::layout::scatter_bits)).
#[cube]
fn scattered(word: u32, #[comptime] value: WeightValue) -> u32 {
    let count = comptime!(bit_moves(value).len());
    if comptime!(count == 0) {
        word
    } else {
        let mut scattered = 0u32.runtime();
        #[unroll]
        for i in 0..count {
            let (bits, by) = comptime!(bit_moves(value)[i]);
            scattered |= shifted(word & bits, by);
        }
        scattered
    }
}

/// Moves the bits of the values of a word of the tile layout back to nibbles or bytes
/// ([`gather_bits`](marlin_format::layout::gather_bits)).
#[cube]
fn gathered(word: u32, #[comptime] value: WeightValue) -> u32 {
    let count = comptime!(bit_moves(value).len());
    if comptime!(count == 0) {
        word
    } else {
        let mut gathered = 0u32.runtime();
        #[unroll]
        for i in 0..count {
            let (bits, by) = comptime!(bit_moves(value)[i]);
            gathered |= shifted(word, comptime!(-by)) & bits;
        }
        gathered
    }
}

/// Converts words of the tile layout to words of the plain layout. With 4 bits, the eight weights
/// of a plain word are one column in half of a tile's rows: two weights from each of four lanes.
/// With 8 bits, the four weights of a plain word come from two lanes.
#[cube(launch)]
pub(super) fn plain_words(
    tiles: &[u32],
    out: &mut [u32],
    plain_columns: u32,
    tiles_n: u32,
    #[comptime] value: WeightValue,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let row = ABSOLUTE_POS as u32 / plain_columns;
    let column = ABSOLUTE_POS as u32 % plain_columns;
    let tile_row = if comptime!(value == WeightValue::E4m3) {
        row / 4 * 2 + column % 16 / 8
    } else {
        row / 2
    };
    let tile = tile_row * tiles_n + column / TILE_N;
    // The index of the tile's word of lane `4 (column % 8)` and the column's sub-tile.
    let first = tile * TILE_WORDS + column % 8 * 16 + column % TILE_N / 16;

    let mut word = 0u32.runtime();
    if comptime!(value.bits() == 4) {
        let shift = (row % 2 * 2 + column % 16 / 8) * 4;
        #[unroll]
        for t in 0..4u32 {
            let four = gathered(tiles[(first + comptime!(4 * t)) as usize], value) >> shift;
            word |= ((four & 15u32) | ((four >> 16u32) & 15u32) << 4u32) << comptime!(8 * t);
        }
    } else if comptime!(value == WeightValue::E4m3) {
        let shift = row % 4 / 2 * 8;
        #[unroll]
        for t in 0..2u32 {
            let index = first + row % 2 * 8 + comptime!(4 * t);
            let two = tiles[index as usize] >> shift;
            word |= ((two & 255u32) | ((two >> 16u32) & 255u32) << 8u32) << comptime!(16 * t);
        }
    } else {
        let shift = column % 16 / 8 * 16;
        #[unroll]
        for t in 0..2u32 {
            let index = first + row % 2 * 8 + comptime!(4 * t);
            let two = gathered(tiles[index as usize], value) >> shift;
            word |= (two & 0xffffu32) << comptime!(16 * t);
        }
    }
    out[ABSOLUTE_POS] = word;
}

/// Converts metadata of the plain layout to the tile layout; see
/// [`SparseLayout`](marlin_format::layout::SparseLayout) for the contents of a word.
///
/// The eight nibbles of a word cover 16 rows of K, half of a plain word, in two columns. A nibble
/// that does not name two rows in ascending order, which occurs only in random bits, is replaced by
/// the nibble of the first two rows. The result of sparse tensor cores is not defined for such a
/// nibble.
#[cube(launch)]
pub(super) fn metadata(
    plain: &[u32],
    out: &mut [u32],
    plain_rows: u32,
    plain_columns: u32,
    tiles_n: u32,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let index = ABSOLUTE_POS as u32;
    let tile = index / TILE_WORDS;
    let lane = index % TILE_WORDS / 4;
    let sub_tile = index % 2 * 2 + lane % 4 / 2;
    let row = tile / tiles_n * 2 + index % 4 / 2;
    let column = tile % tiles_n * TILE_N + sub_tile * 16 + lane / 4;
    let shift = lane % 2 * 16;

    let mut word = 0u32.runtime();
    #[unroll]
    for half in 0..2u32 {
        let column = column + comptime!(8 * half);
        let mut four = comptime!(MetadataLayout::PADDING_WORD & 0xffff).runtime();
        if row < plain_rows && column < plain_columns {
            four = (plain[(row * plain_columns + column) as usize] >> shift) & 0xffffu32;
        }
        word |= four << comptime!(16 * half);
    }
    // Tests in the lowest bit of each nibble, bit by bit, whether the first index is below the
    // second.
    let (a0, a1, b0, b1) = (word, word >> 1u32, word >> 2u32, word >> 3u32);
    let is_below = (!a1 & b1) | (!(a1 ^ b1) & !a0 & b0);
    let bad = !is_below & 0x1111_1111u32;
    out[ABSOLUTE_POS] =
        (word & !(bad * 15u32)) | (bad * comptime!(u32::from(MetadataLayout::PADDING)));
}

/// Converts metadata of the tile layout to the plain layout.
#[cube(launch)]
pub(super) fn plain_metadata(tiles: &[u32], out: &mut [u32], plain_columns: u32, tiles_n: u32) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let row = ABSOLUTE_POS as u32 / plain_columns;
    let column = ABSOLUTE_POS as u32 % plain_columns;
    let tile = row / 2 * tiles_n + column / TILE_N;
    let sub_tile = column % TILE_N / 16;
    // The index of the word of the first of two lanes.
    let first =
        tile * TILE_WORDS + (column % 8 * 4 + sub_tile % 2 * 2) * 4 + row % 2 * 2 + sub_tile / 2;
    let shift = column % 16 / 8 * 16;
    let low = (tiles[first as usize] >> shift) & 0xffffu32;
    let high = (tiles[(first + 4) as usize] >> shift) & 0xffffu32;
    out[ABSOLUTE_POS] = low | high << 16u32;
}

/// Expands the words of the kept values of a 2:4 weight to words of all values, in the plain
/// layout. The other values become the zero point.
#[cube(launch)]
pub(super) fn expand(
    kept: &[u32],
    metadata: &[u32],
    zero_points: ComptimeOption<&[u32]>,
    out: &mut [u32],
    k: u32,
    n: u32,
    columns: u32,
    group: u32,
    #[comptime] value: WeightValue,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let (per_word, count, max) = comptime!((
        value.per_word() as u32,
        value.bits() as u32,
        u32::from(value.max())
    ));
    let row = ABSOLUTE_POS as u32 / columns;
    let column = ABSOLUTE_POS as u32 % columns;
    let first = row * per_word;
    let mut word = comptime!(value.padding_word()).runtime();
    if column < n {
        let zero = #[comptime]
        match zero_points {
            ComptimeOption::Some(words) => {
                let word =
                    words[(first / group * n.div_ceil(per_word) + column / per_word) as usize];
                (word >> (column % per_word * count)) & max
            }
            ComptimeOption::None => comptime!(u32::from(value.midpoint())).runtime(),
        };
        let kept = kept[(row / 2 * columns + column) as usize] >> (row % 2 * 16);
        let nibbles = metadata[(first / 32 * columns + column) as usize] >> (first % 32);
        #[unroll]
        for four in 0..comptime!(per_word / 4) {
            // K is a multiple of four.
            if first + comptime!(4 * four) < k {
                let mut values = zero * comptime!((u32::MAX >> (32 - 4 * count)) / max);
                #[unroll]
                for i in 0..2u32 {
                    let place = ((nibbles >> comptime!(4 * four + 2 * i)) & 3u32) * count;
                    let value = (kept >> comptime!((2 * four + i) * count)) & max;
                    values = (values & !(max << place)) | (value << place);
                }
                let (mask, shift) = comptime!((u32::MAX >> (32 - 4 * count), 4 * four * count));
                word = (word & comptime!(!(mask << shift))) | (values << shift);
            }
        }
    }
    out[ABSOLUTE_POS] = word;
}

/// Converts scales [G, N] from the plain to the tile layout, or back: the order of columns within a
/// block is its own inverse. Padding is 0.
#[cube(launch)]
pub(super) fn scales<S: Float>(
    source: &[S],
    out: &mut [S],
    source_groups: u32,
    source_columns: u32,
    out_columns: u32,
    #[comptime] grouped: bool,
    #[define(S)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let group = ABSOLUTE_POS as u32 / out_columns;
    let place = ABSOLUTE_POS as u32 % out_columns;
    let column = if comptime!(grouped) {
        place / 64 * 64 + place % 8 * 8 + place % 64 / 8
    } else {
        place / 32 * 32 + place % 8 / 2 * 8 + place % 32 / 8 * 2 + place % 2
    };
    let mut scale = S::cast_from(0.0f32);
    if column < source_columns && group < source_groups {
        scale = source[(group * source_columns + column) as usize];
    }
    out[ABSOLUTE_POS] = scale;
}

/// Converts 4-bit zero points [G, N/8] from the plain to the tile layout, or back: eight words of
/// eight nibbles are transposed. Padding is 0.
#[cube(launch)]
pub(super) fn zero_points(
    source: &[u32],
    out: &mut [u32],
    source_groups: u32,
    source_words: u32,
    out_words: u32,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let group = ABSOLUTE_POS as u32 / out_words;
    let place = ABSOLUTE_POS as u32 % out_words;
    // The output word consists of nibble `place % 8` of eight source words.
    let first = place / 8 * 8;
    let shift = place % 8 * 4;
    let mut word = 0u32.runtime();
    #[unroll]
    for i in 0..8u32 {
        if first + i < source_words && group < source_groups {
            word |= ((source[(group * source_words + first + i) as usize] >> shift) & 15u32)
                << comptime!(4 * i);
        }
    }
    out[ABSOLUTE_POS] = word;
}

/// Converts 8-bit zero points [G, N/4] from the plain to the tile layout: words `2g` and `2g + 1`
/// of 64 columns hold columns `g + 8i`. Padding is 0.
#[cube(launch)]
pub(super) fn byte_zero_points(
    source: &[u32],
    out: &mut [u32],
    source_groups: u32,
    source_words: u32,
    out_words: u32,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let group = ABSOLUTE_POS as u32 / out_words;
    let place = ABSOLUTE_POS as u32 % out_words;
    let column = place / 16 * 64 + place % 16 / 2 + place % 2 * 32;
    let mut word = 0u32.runtime();
    #[unroll]
    for i in 0..4u32 {
        let from = column / 4 + comptime!(2 * i);
        if from < source_words && group < source_groups {
            word |= ((source[(group * source_words + from) as usize] >> (column % 4 * 8)) & 255u32)
                << comptime!(8 * i);
        }
    }
    out[ABSOLUTE_POS] = word;
}

/// Converts 8-bit zero points from the tile to the plain layout.
#[cube(launch)]
pub(super) fn plain_byte_zero_points(
    source: &[u32],
    out: &mut [u32],
    source_words: u32,
    out_words: u32,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let group = ABSOLUTE_POS as u32 / out_words;
    let column = ABSOLUTE_POS as u32 % out_words * 4;
    let first = column / 64 * 16 + column % 8 * 2 + column % 64 / 32;
    let shift = column % 32 / 8 * 8;
    let mut word = 0u32.runtime();
    #[unroll]
    for i in 0..4u32 {
        word |= ((source[(group * source_words + first + comptime!(2 * i)) as usize] >> shift)
            & 255u32)
            << comptime!(8 * i);
    }
    out[ABSOLUTE_POS] = word;
}

/// Copies activations [M, K] to [M, K padded]. Column `i` of the output is column
/// `row_permutation[i]` of the input, or column `i` without a permutation. Padding is 0.
#[cube(launch)]
pub(super) fn arrange<F: Float>(
    x: &[F],
    row_permutation: ComptimeOption<&[u32]>,
    out: &mut [F],
    k: u32,
    k_padded: u32,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let row = ABSOLUTE_POS as u32 / k_padded;
    let column = ABSOLUTE_POS as u32 % k_padded;
    let mut value = F::cast_from(0.0f32);
    if column < k {
        let natural = #[comptime]
        match row_permutation {
            ComptimeOption::Some(rows) => rows[column as usize],
            ComptimeOption::None => column,
        };
        value = x[(row * k + natural) as usize];
    }
    out[ABSOLUTE_POS] = value;
}
