use cubecl::prelude::*;

/// Columns of a tile of [`MarlinLayout`](marlin_format::layout::MarlinLayout).
const TILE_N: u32 = 64;
/// Words of a tile.
const TILE_WORDS: u32 = 128;

/// Words of the plain layout to words of the tile layout; see [`MarlinLayout`](marlin_format::layout::MarlinLayout) for what a word holds.
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
        // Pairs 0 and 1 are rows 0 to 7 and 8 to 15 of the first column, pairs 2 and 3 of the second.
        let row = row + comptime!(pair % 2);
        let column = column + comptime!(pair / 2 * 8);
        // Past the plain layout's own padding every value is 8.
        let mut two = 0x88u32.runtime();
        if row < plain_rows && column < plain_columns {
            two = plain[(row * plain_columns + column) as usize] >> shift;
        }
        word |= ((two & 15u32) << comptime!(4 * pair)) | (((two >> 4u32) & 15u32) << comptime!(4 * pair + 16));
    }
    out[ABSOLUTE_POS] = word;
}

/// Scales [G, N] to [`ScaleLayout`](marlin_format::layout::ScaleLayout); padding is 0.
#[cube(launch)]
pub(super) fn scales<S: Float>(
    plain: &[S],
    out: &mut [S],
    n: u32,
    n_padded: u32,
    #[comptime] grouped: bool,
    #[define(S)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let group = ABSOLUTE_POS as u32 / n_padded;
    let place = ABSOLUTE_POS as u32 % n_padded;
    let column = if comptime!(grouped) {
        place / 64 * 64 + place % 8 * 8 + place % 64 / 8
    } else {
        place / 32 * 32 + place % 8 / 2 * 8 + place % 32 / 8 * 2 + place % 2
    };
    let source = group * n + column;
    let mut scale = S::cast_from(0.0f32);
    if column < n && source < plain.len() as u32 {
        scale = plain[source as usize];
    }
    out[ABSOLUTE_POS] = scale;
}

/// Zero points [G, N/8] to [`ZeroLayout`](marlin_format::layout::ZeroLayout); padding is 0.
#[cube(launch)]
pub(super) fn zero_points(plain: &[u32], out: &mut [u32], plain_words: u32, words: u32) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let group = ABSOLUTE_POS as u32 / words;
    let place = ABSOLUTE_POS as u32 % words;
    // Columns 64b + 8i + r of nibbles i: nibble r of eight words.
    let first = place / 8 * 8;
    let shift = place % 8 * 4;
    let mut word = 0u32.runtime();
    #[unroll]
    for i in 0..8u32 {
        let source = group * plain_words + first + i;
        if first + i < plain_words && source < plain.len() as u32 {
            word |= ((plain[source as usize] >> shift) & 15u32) << comptime!(4 * i);
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
