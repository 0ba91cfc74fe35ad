//! Packed words between files' orders and [`PlainLayout`]: the loops that formats share, over whole words and on all cores.

use rayon::prelude::*;

use crate::layout::PlainLayout;
use crate::{Bits, PlainWeight};

/// Words of a file: little-endian, at any alignment.
pub(super) type FileWords = [[u8; 4]];

/// Rows of a transposed matrix that one call of [`transpose_into`] makes: from each row of the source it reads four cache lines in a run.
pub(super) const TRANSPOSE_ROWS: usize = 64;
/// Rows and columns that it moves at a time: 16 words are a cache line, so that each line is read and written once.
const TILE: usize = 16;

/// Words in [`PlainLayout`], made on all cores in blocks of `rows` rows of words: `fill` gets the index of a block's first row of words and
/// the block, in which rows lie `columns()` words apart, and writes the first N words of each. What it writes past K is overwritten.
pub(super) fn plain_words(k: usize, n: usize, bits: Bits, rows: usize, fill: impl Fn(usize, &mut [u32]) + Sync) -> Vec<u32> {
    let layout = PlainLayout::new(k, n, bits);
    let (columns, last_row) = (layout.columns(), layout.rows() - 1);
    let padding = bits.padding_word();
    let mut words = vec![0; layout.words()];
    words.par_chunks_mut(rows * columns).enumerate().for_each(|(block, words)| {
        fill(block * rows, words);
        for (i, line) in words.chunks_exact_mut(columns).enumerate() {
            line[n..].fill(padding);
            if block * rows + i == last_row {
                let mask = rows_mask(k, last_row, bits);
                line.iter_mut().for_each(|word| *word = (*word & mask) | (padding & !mask));
            }
        }
    });
    words
}

/// Rows of words `[ceil(K / values in a word), stride]`, of which the first N words count, to [`PlainLayout`]; with a permutation, stored
/// row `i` is row `permutation[i]` of `source`.
pub(super) fn from_rows(source: &FileWords, stride: usize, k: usize, n: usize, bits: Bits, permutation: Option<&[u32]>) -> Vec<u32> {
    let source_row = |row: usize| source[row * stride..][..n].iter().map(|&word| u32::from_le_bytes(word));
    let Some(permutation) = permutation else {
        return plain_words(k, n, bits, 1, |row, line| line.iter_mut().zip(source_row(row)).for_each(|(to, from)| *to = from));
    };
    match bits {
        Bits::Four => permuted::<8>(source, stride, k, n, bits, permutation),
        Bits::Eight => permuted::<4>(source, stride, k, n, bits, permutation),
    }
}

/// [`from_rows`] with a permutation, of `V` values to a word.
fn permuted<const V: usize>(source: &FileWords, stride: usize, k: usize, n: usize, bits: Bits, permutation: &[u32]) -> Vec<u32> {
    let max = u32::from(bits.max());
    plain_words(k, n, bits, 1, |row, line| {
        // Past K any row does.
        let natural: [usize; V] = std::array::from_fn(|slot| permutation.get(V * row + slot).map_or(0, |&natural| natural as usize));
        let rows = natural.map(|natural| &source[natural / V * stride..][..n]);
        let shifts = natural.map(|natural| bits.count() * (natural % V));
        for (column, word) in line[..n].iter_mut().enumerate() {
            let value = |slot: usize| (u32::from_le_bytes(rows[slot][column]) >> shifts[slot]) & max;
            *word = (0..V).fold(0, |word, slot| word | (value(slot) << (32 / V * slot)));
        }
    })
}

/// The words of a weight with its rows in their natural order, in [`PlainLayout`].
pub(super) fn natural_words(weight: &PlainWeight) -> Vec<u32> {
    let Some(permutation) = weight.row_permutation() else {
        return weight.words().to_vec();
    };
    let mut inverse = vec![0; permutation.len()];
    for (stored, &natural) in permutation.iter().enumerate() {
        inverse[natural as usize] = stored as u32;
    }
    let words = bytemuck::cast_slice(weight.words());
    from_rows(words, weight.layout().columns(), weight.k(), weight.n(), weight.spec().bits, Some(&inverse))
}

/// The bits of the words in row `row` of [`PlainLayout`] whose values are rows below K.
pub(super) fn rows_mask(k: usize, row: usize, bits: Bits) -> u32 {
    let rows = k - bits.per_word() * row;
    if rows >= bits.per_word() { u32::MAX } else { !(u32::MAX << (bits.count() * rows)) }
}

/// `[rows, columns]` to `[columns, rows]`.
pub(super) fn transposed<T: Copy + Default + Send + Sync>(values: &[T], rows: usize, columns: usize) -> Vec<T> {
    let mut result = vec![T::default(); values.len()];
    result.par_chunks_mut(TRANSPOSE_ROWS * rows).enumerate().for_each(|(block, lines)| {
        transpose_into(values, [rows, columns], TRANSPOSE_ROWS * block, lines, rows, |value| value);
    });
    result
}

/// Columns `first..` of `source` (`[rows, columns]`) to the rows of `lines`, which lie `stride` apart.
pub(super) fn transpose_into<S: Copy, T: Copy + Default>(
    source: &[S],
    [rows, columns]: [usize; 2],
    first: usize,
    lines: &mut [T],
    stride: usize,
    convert: impl Fn(S) -> T,
) {
    let width = lines.len() / stride;
    for start in (0..rows).step_by(TILE) {
        for left in (0..width).step_by(TILE) {
            let (height, width) = (TILE.min(rows - start), TILE.min(width - left));
            let mut tile = [[T::default(); TILE]; TILE];
            for (i, to) in tile[..height].iter_mut().enumerate() {
                let line = &source[(start + i) * columns + first + left..][..width];
                match <&[S; TILE]>::try_from(line) {
                    Ok(line) => *to = line.map(&convert),
                    Err(_) => to.iter_mut().zip(line).for_each(|(to, &from)| *to = convert(from)),
                }
            }
            for (j, line) in lines[left * stride..].chunks_exact_mut(stride).take(width).enumerate() {
                let column: [T; TILE] = std::array::from_fn(|i| tile[i][j]);
                line[start..][..height].copy_from_slice(&column[..height]);
            }
        }
    }
}

/// Words `[rows, ceil(N / values in a word)]` to values `[rows, N]`. `shifts` says how far each of a word's columns lies from its lowest bit.
pub(super) fn unpack_columns(words: &FileWords, n: usize, bits: Bits, shifts: &[u32]) -> Vec<u8> {
    let words_a_row = n.div_ceil(shifts.len());
    let mut values = Vec::with_capacity(words.len() * shifts.len());
    for line in words.chunks_exact(words_a_row) {
        let end = values.len() + n;
        for &word in line {
            let word = u32::from_le_bytes(word);
            values.extend(shifts.iter().map(|shift| (word >> shift) as u8 & bits.max()));
        }
        values.truncate(end);
    }
    values
}

/// Undoes [`unpack_columns`] for [`ascending`] shifts, with padding of 0.
pub(super) fn pack_columns(values: &[u8], n: usize, bits: Bits) -> Vec<u32> {
    let pack = |values: &[u8]| values.iter().rev().fold(0, |word, &value| (word << bits.count()) | u32::from(value));
    values.chunks_exact(n).flat_map(|line| line.chunks(bits.per_word()).map(pack)).collect()
}

/// The shifts of a word whose first column is lowest.
pub(super) fn ascending(bits: Bits) -> Vec<u32> {
    (0..32).step_by(bits.count()).collect()
}
