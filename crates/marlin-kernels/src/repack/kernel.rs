use cubecl::prelude::*;

/// Columns of a tile of [`MarlinLayout`](marlin_format::layout::MarlinLayout).
const TILE_N: u32 = 64;
/// Words of a tile.
const TILE_WORDS: u32 = 128;

/// Words of the plain layout to words of the tile layout; see [`MarlinLayout`](marlin_format::layout::MarlinLayout) for the contents of a word.
///
/// The eight weights of a word are two pairs of rows of four plain words: `2t, 2t + 1` of rows 0 to 7 and of rows 8 to 15, in two columns.
#[cube(launch)]
pub(super) fn words(plain: &[u32], out: &mut [u32], plain_rows: u32, plain_columns: u32, tiles_n: u32) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let index = ABSOLUTE_POS as u32;
    let tile = index / TILE_WORDS;
    let lane = index % TILE_WORDS / 4;
    let column = tile % tiles_n * TILE_N + index % 4 * 16 + lane / 4;
    let row = tile / tiles_n * 2;
    let shift = lane % 4 * 8;

    let mut word = 0u32.runtime();
    #[unroll]
    for pair in 0..4u32 {
        // Pairs 0 and 1 are rows 0 to 7 of the first column and of the second, pairs 2 and 3 rows 8 to 15.
        let row = row + comptime!(pair / 2);
        let column = column + comptime!(pair % 2 * 8);
        // Past the plain layout's own padding every value is 8.
        let mut two = 0x88u32.runtime();
        if row < plain_rows && column < plain_columns {
            two = plain[(row * plain_columns + column) as usize] >> shift;
        }
        word |= ((two & 15u32) << comptime!(4 * pair)) | (((two >> 4u32) & 15u32) << comptime!(4 * pair + 16));
    }
    out[ABSOLUTE_POS] = word;
}

/// Words of the tile layout to words of the plain layout. The eight weights of a word are one column's in half of a tile's rows: two each
/// of four lanes.
#[cube(launch)]
pub(super) fn plain_words(tiles: &[u32], out: &mut [u32], plain_columns: u32, tiles_n: u32) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let row = ABSOLUTE_POS as u32 / plain_columns;
    let column = ABSOLUTE_POS as u32 % plain_columns;
    let tile = row / 2 * tiles_n + column / TILE_N;
    // Of the tile's words, that of lane `4 (column % 8)` and the column's sub-tile.
    let first = tile * TILE_WORDS + column % 8 * 16 + column % TILE_N / 16;
    let shift = (row % 2 * 2 + column % 16 / 8) * 4;

    let mut word = 0u32.runtime();
    #[unroll]
    for t in 0..4u32 {
        let four = tiles[(first + comptime!(4 * t)) as usize] >> shift;
        word |= ((four & 15u32) | ((four >> 16u32) & 15u32) << 4u32) << comptime!(8 * t);
    }
    out[ABSOLUTE_POS] = word;
}

/// Scales [G, N] from the plain to the tile layout, or back: the order of columns within a block is its own inverse. Padding is 0.
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

/// Zero points [G, N/8] from the plain to the tile layout, or back: eight words of eight nibbles are transposed. Padding is 0.
#[cube(launch)]
pub(super) fn zero_points(source: &[u32], out: &mut [u32], source_groups: u32, source_words: u32, out_words: u32) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let group = ABSOLUTE_POS as u32 / out_words;
    let place = ABSOLUTE_POS as u32 % out_words;
    // Nibble `place % 8` of eight words.
    let first = place / 8 * 8;
    let shift = place % 8 * 4;
    let mut word = 0u32.runtime();
    #[unroll]
    for i in 0..8u32 {
        if first + i < source_words && group < source_groups {
            word |= ((source[(group * source_words + first + i) as usize] >> shift) & 15u32) << comptime!(4 * i);
        }
    }
    out[ABSOLUTE_POS] = word;
}

/// Activations [M, K] to [M, K padded]: column `i` is column `row_permutation[i]`, or `i`; padding is 0.
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
