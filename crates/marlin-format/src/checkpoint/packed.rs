//! Conversion of packed words between the orders of files and [`PlainLayout`]. The formats share
//! these loops, which process whole words on all cores.

use rayon::prelude::*;

use crate::layout::PlainLayout;
use crate::{PlainWeight, WeightValue};

/// The words of a file: little-endian, at any alignment.
pub(super) type FileWords = [[u8; 4]];

/// The number of rows of a transposed matrix that are written together: eight consecutive cache
/// lines are read from each row of the source. With half as many rows, page table lookups for all
/// source rows take noticeable time.
pub(super) const TRANSPOSE_ROWS: usize = 128;
/// The number of columns of a transposed weight that one call of [`transpose_into`] writes, so that
/// there are blocks for all cores: a weight of Llama 2 7B has at least 32.
const TRANSPOSE_COLUMNS: usize = 512;
/// The number of source rows that [`transpose_into`] moves at a time. 16 words are a cache line, so
/// each line is written once.
const TILE: usize = 16;
/// The number of columns whose rows are permuted at a time. All their words, 512 KB for K = 8192,
/// stay in a core's cache.
pub(super) const PERMUTED_COLUMNS: usize = 128;

/// Fills `words` in `layout` on all cores, in blocks of `rows` rows of words. `fill` receives the
/// index of the first row of words of a block, and the block. Rows of a block are `columns()` words
/// apart, and `fill` writes the first N words of each row. Values that `fill` writes past K are
/// overwritten with padding.
pub(super) fn plain_words(
    mut words: Vec<u32>,
    layout: &PlainLayout,
    rows: usize,
    fill: impl Fn(usize, &mut [u32]) + Sync,
) -> Vec<u32> {
    let blocks = words.par_chunks_mut(rows * layout.columns()).enumerate();
    blocks.for_each(|(block, words)| fill(block * rows, words));
    layout.pad(&mut words);
    words
}

/// Fills `words` as [`plain_words`] does, such that stored row `i` is natural row `permutation[i]`.
/// `load` receives the index of a first column, and writes the words of the columns from there on,
/// with rows in their natural order.
pub(super) fn permuted_words(
    words: Vec<u32>,
    layout: &PlainLayout,
    permutation: &[u32],
    load: impl Fn(usize, &mut [[u32; PERMUTED_COLUMNS]]) + Sync,
) -> Vec<u32> {
    match layout.bits.per_word() {
        8 => permuted::<8>(words, layout, permutation, load),
        _ => permuted::<4>(words, layout, permutation, load),
    }
}

/// Implements [`permuted_words`] for `V` values per word.
fn permuted<const V: usize>(
    mut words: Vec<u32>,
    layout: &PlainLayout,
    permutation: &[u32],
    load: impl Fn(usize, &mut [[u32; PERMUTED_COLUMNS]]) + Sync,
) -> Vec<u32> {
    let (bits, max) = (layout.bits.bits(), u32::from(layout.bits.max()));
    let mut blocks: Vec<Vec<&mut [u32]>> = (0..layout.columns().div_ceil(PERMUTED_COLUMNS))
        .map(|_| Vec::with_capacity(layout.rows()))
        .collect();
    for line in words.chunks_exact_mut(layout.columns()) {
        blocks
            .iter_mut()
            .zip(line.chunks_mut(PERMUTED_COLUMNS))
            .for_each(|(block, part)| block.push(part));
    }
    let natural = || vec![[0; PERMUTED_COLUMNS]; layout.rows()];
    blocks
        .into_par_iter()
        .enumerate()
        .for_each_init(natural, |natural, (block, lines)| {
            load(PERMUTED_COLUMNS * block, natural);
            for (rows, line) in permutation.chunks(V).zip(lines) {
                let mut stored = [0; PERMUTED_COLUMNS];
                for (slot, &row) in rows.iter().enumerate() {
                    let (from, to) = (bits * (row as usize % V), bits * slot);
                    stored
                        .iter_mut()
                        .zip(&natural[row as usize / V])
                        .for_each(|(word, natural)| *word |= ((natural >> from) & max) << to);
                }
                line.copy_from_slice(&stored[..line.len()]);
            }
        });
    layout.pad(&mut words);
    words
}

/// Converts rows of words `[ceil(K / values in a word), stride]`, of which the first N words are
/// used, to `layout`. With a permutation, stored row `i` is row `permutation[i]` of `source`.
pub(super) fn from_rows(
    words: Vec<u32>,
    layout: &PlainLayout,
    source: &FileWords,
    stride: usize,
    permutation: Option<&[u32]>,
) -> Vec<u32> {
    let copy = |to: &mut [u32], from: &FileWords| {
        to.iter_mut()
            .zip(from)
            .for_each(|(to, &from)| *to = u32::from_le_bytes(from))
    };
    match permutation {
        None => plain_words(words, layout, 1, |row, line| {
            copy(line, &source[row * stride..][..layout.n])
        }),
        Some(permutation) => permuted_words(words, layout, permutation, |column, lines| {
            lines
                .iter_mut()
                .zip(source.chunks_exact(stride))
                .for_each(|(line, row)| copy(line, &row[column..layout.n]));
        }),
    }
}

/// Returns the words of a weight in [`PlainLayout`], with rows in their natural order.
pub(super) fn natural_words(weight: &PlainWeight) -> Vec<u32> {
    let Some(permutation) = weight.row_permutation() else {
        return weight.qweight().to_vec();
    };
    let mut inverse = vec![0; permutation.len()];
    for (stored, &natural) in permutation.iter().enumerate() {
        inverse[natural as usize] = stored as u32;
    }
    let layout = weight.layout();
    from_rows(
        vec![0; layout.words()],
        &layout,
        bytemuck::cast_slice(weight.qweight()),
        layout.columns(),
        Some(&inverse),
    )
}

/// Transposes `[rows, columns]` to `[columns, rows]`.
pub(super) fn transposed<T: Copy + Default + Send + Sync>(
    values: &[T],
    rows: usize,
    columns: usize,
) -> Vec<T> {
    transposed_as(values, rows, columns, |value| value)
}

/// Transposes `[rows, columns]` to `[columns, rows]`, and converts every value.
pub(super) fn transposed_as<S: Copy + Sync, T: Copy + Default + Send>(
    values: &[S],
    rows: usize,
    columns: usize,
    convert: impl Fn(S) -> T + Sync,
) -> Vec<T> {
    let mut result = vec![T::default(); values.len()];
    let blocks = result.par_chunks_mut(TRANSPOSE_ROWS * rows).enumerate();
    blocks.for_each(|(block, lines)| {
        let first = TRANSPOSE_ROWS * block;
        let mut lines: Vec<&mut [T]> = lines.chunks_exact_mut(rows).collect();
        transpose_into(values, [rows, columns], first, &mut lines, &convert);
    });
    result
}

/// Converts the rows of bytes of a file, one for each of N columns, to `layout`. The first value of
/// a row is in the lowest bits of its first byte. A row has the bytes of K values, rounded up.
pub(super) fn from_byte_rows(words: Vec<u32>, layout: &PlainLayout, bytes: &[u8]) -> Vec<u32> {
    let (n, rows) = (layout.n, layout.rows());
    let row_bytes = bytes.len() / n;
    // Four bytes of a row are a word of the layout, so only whole words are transposed.
    if row_bytes == 4 * rows {
        return from_columns(words, layout, bytes.as_chunks().0);
    }
    let mut padded = vec![[0; 4]; n * rows];
    padded
        .par_chunks_exact_mut(rows)
        .zip(bytes.par_chunks_exact(row_bytes))
        .for_each(|(words, bytes)| words.as_flattened_mut()[..row_bytes].copy_from_slice(bytes));
    from_columns(words, layout, &padded)
}

/// Transposes words `[N, rows]` to `layout`, with rows in their natural order.
pub(super) fn from_columns(
    mut words: Vec<u32>,
    layout: &PlainLayout,
    source: &FileWords,
) -> Vec<u32> {
    let (n, rows, columns) = (layout.n, layout.rows(), layout.columns());
    let mut blocks: Vec<(usize, usize, Vec<&mut [u32]>)> = Vec::new();
    for (block, lines) in words.chunks_mut(TRANSPOSE_ROWS * columns).enumerate() {
        let of_rows = blocks.len();
        blocks.extend(
            (0..columns)
                .step_by(TRANSPOSE_COLUMNS)
                .map(|column| (TRANSPOSE_ROWS * block, column, Vec::new())),
        );
        for line in lines.chunks_exact_mut(columns) {
            let parts = line.chunks_mut(TRANSPOSE_COLUMNS);
            blocks[of_rows..]
                .iter_mut()
                .zip(parts)
                .for_each(|((_, _, lines), part)| lines.push(part));
        }
    }
    blocks
        .into_par_iter()
        .for_each(|(first, column, mut lines)| {
            let shape = [TRANSPOSE_COLUMNS.min(n - column), rows];
            let source = &source[column * rows..];
            transpose_into(source, shape, first, &mut lines, u32::from_le_bytes);
        });
    layout.pad(&mut words);
    words
}

/// Transposes columns `first..` of `source` (`[rows, columns]`), one to each of `lines`.
///
/// Source rows are copied to a tile on the stack first: 4 GB/s on one core, where reading a cache
/// line of each row at a time gave 1.2 (11008 rows of 512 words, an Intel Xeon of 2 cores).
pub(super) fn transpose_into<S: Copy, T: Copy + Default>(
    source: &[S],
    [rows, columns]: [usize; 2],
    first: usize,
    lines: &mut [&mut [T]],
    convert: impl Fn(S) -> T,
) {
    let mut tile = [[T::default(); TRANSPOSE_ROWS]; TILE];
    for (block, lines) in lines.chunks_mut(TRANSPOSE_ROWS).enumerate() {
        let first = first + block * TRANSPOSE_ROWS;
        for start in (0..rows).step_by(TILE) {
            let height = TILE.min(rows - start);
            for (i, to) in tile[..height].iter_mut().enumerate() {
                let from = &source[(start + i) * columns + first..][..lines.len()];
                to.iter_mut()
                    .zip(from)
                    .for_each(|(to, &from)| *to = convert(from));
            }
            for (j, line) in lines.iter_mut().enumerate() {
                let to = &mut line[start..][..height];
                to.iter_mut()
                    .zip(&tile)
                    .for_each(|(to, from)| *to = from[j]);
            }
        }
    }
}

/// Words `[rows, ceil(N / values in a word)]` to values `[rows, N]`. `shifts` is the distance of
/// each of a word's columns from its lowest bit.
pub(super) fn unpack_columns(
    words: &FileWords,
    n: usize,
    bits: WeightValue,
    shifts: &[u32],
) -> Vec<u8> {
    let words_a_row = n.div_ceil(shifts.len());
    let mut values = vec![0; words.len() / words_a_row * n];
    values
        .par_chunks_exact_mut(n)
        .zip(words.par_chunks_exact(words_a_row))
        .for_each(|(line, words)| {
            for (values, &word) in line.chunks_mut(shifts.len()).zip(words) {
                let word = u32::from_le_bytes(word);
                values
                    .iter_mut()
                    .zip(shifts)
                    .for_each(|(value, shift)| *value = (word >> shift) as u8 & bits.max());
            }
        });
    values
}

/// Undoes [`unpack_columns`] for [`ascending`] shifts, with padding of 0.
pub(super) fn pack_columns(values: &[u8], n: usize, bits: WeightValue) -> Vec<u32> {
    let pack = |values: &[u8]| {
        values
            .iter()
            .rev()
            .fold(0, |word, &value| (word << bits.bits()) | u32::from(value))
    };
    values
        .chunks_exact(n)
        .flat_map(|line| line.chunks(bits.per_word()).map(pack))
        .collect()
}

/// The shifts of a word whose first column is lowest.
pub(super) fn ascending(bits: WeightValue) -> Vec<u32> {
    (0..32).step_by(bits.bits()).collect()
}
