//! The float weight, a few columns at a time.

use super::HostFloat;
use super::pool::threads;
use super::simd::{Kernel, LANES, Simd, dispatch};
use super::threads::{Columns, for_each};
use super::weight::Reader;
use std::ops::Range;

/// Columns whose scales are at hand.
const STRIP: usize = 2048;
/// Columns below which those of a chunk are not split.
const MIN_COLUMNS: usize = 2048;

/// The values of words, row by row: `q scale + offset`, where the offset is `-zero scale`.
#[inline(always)]
pub fn unpack<S: Simd, const PER_WORD: usize>(simd: S, mut words: S::U32, scales: S::F32, offsets: S::F32) -> [S::F32; PER_WORD] {
    let mask = (1u32 << (32 / PER_WORD)) - 1;
    let mut values = [offsets; PER_WORD];
    for value in &mut values {
        *value = simd.mul_add(simd.to_f32(simd.and(words, mask)), scales, offsets);
        words = match PER_WORD {
            8 => simd.shift_right::<4>(words),
            _ => simd.shift_right::<8>(words),
        };
    }
    values
}

/// Writes the float weight [K, N] to `out`, in natural row order.
pub fn dequantize<T: HostFloat>(reader: &Reader<'_>, per_word: usize, permutation: Option<&[u32]>, out: &mut [T], n: usize) {
    let (k, elements) = (out.len() / n.max(1), out.len());
    // A task is a chunk of K, so that threads write far from each other: with columns of the same rows they took each other's cache lines
    // (two threads were three times slower than one). Where chunks are few, columns are split too, pages apart.
    let chunks = k.div_ceil(reader.chunk);
    let parts = (4 * threads()).div_ceil(chunks.max(1)).min(n.div_ceil(MIN_COLUMNS)).max(1);
    let width = n.div_ceil(parts).next_multiple_of(STRIP);
    let parts = n.div_ceil(width);
    let out = Columns::new(out, n);
    for_each(chunks * parts, elements, |task| {
        let (chunk, part) = (task / parts, task % parts);
        for start in (part * width..n.min((part + 1) * width)).step_by(STRIP) {
            let columns = start..n.min(start + STRIP);
            match per_word {
                8 => dispatch(Strip::<T, 8> { reader, permutation, out: &out, k, chunk, columns }),
                _ => dispatch(Strip::<T, 4> { reader, permutation, out: &out, k, chunk, columns }),
            }
        }
    });
}

/// A chunk of K, of some columns.
struct Strip<'a, T, const PER_WORD: usize> {
    reader: &'a Reader<'a>,
    permutation: Option<&'a [u32]>,
    out: &'a Columns<'a, T>,
    k: usize,
    chunk: usize,
    columns: Range<usize>,
}

impl<T: HostFloat, const PER_WORD: usize> Kernel for Strip<'_, T, PER_WORD> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let zero = simd.splat(0.0);
        let (mut scales, mut offsets) = ([zero; STRIP / LANES], [zero; STRIP / LANES]);
        for (i, (scale, offset)) in scales.iter_mut().zip(&mut offsets).enumerate().take(self.columns.len().div_ceil(LANES)) {
            (*scale, *offset) = self.reader.scale_and_offset(simd, self.chunk, self.columns.start + i * LANES);
        }
        let start = self.chunk * self.reader.chunk;
        let end = self.k.min(start + self.reader.chunk);
        for first in (start..end).step_by(PER_WORD) {
            self.word_row(simd, first, end, &scales, &offsets);
        }
    }
}

impl<T: HostFloat, const PER_WORD: usize> Strip<'_, T, PER_WORD> {
    /// Writes the rows of K below `end` that a row of words has, from `first` on: as many streams of stores, which go on from column to column.
    #[inline(always)]
    fn word_row<S: Simd>(&self, simd: S, first: usize, end: usize, scales: &[S::F32], offsets: &[S::F32]) {
        let (start, width) = (self.columns.start, self.columns.len());
        let mut rows = [std::ptr::null_mut(); PER_WORD];
        for (stored, row) in (first..end).zip(&mut rows) {
            let natural = match self.permutation {
                Some(rows) => rows[stored] as usize,
                None => stored,
            };
            *row = self.out.start(natural, start, width);
        }
        let rows = &rows[..PER_WORD.min(end - first)];
        let mut i = 0;
        // Many columns of a row at once: a tenth faster than stores that go from row to row with each vector.
        while S::REGISTERS >= 32 && (i + 8) * LANES <= width {
            self.block::<S, 8>(simd, first, start, i, rows, scales, offsets);
            i += 8;
        }
        while (i + 2) * LANES <= width {
            self.block::<S, 2>(simd, first, start, i, rows, scales, offsets);
            i += 2;
        }
        while i * LANES < width {
            let (scales, offsets) = (scales[i], offsets[i]);
            let values = unpack::<S, PER_WORD>(simd, self.reader.words(simd, first / PER_WORD, start + i * LANES), scales, offsets);
            for (row, value) in rows.iter().zip(values) {
                let mut all = [T::default(); LANES];
                T::store(simd, value, &mut all);
                let rest = LANES.min(width - i * LANES);
                // SAFETY: the row has these columns, which no other task has; nothing else borrows them.
                unsafe { std::slice::from_raw_parts_mut(row.add(i * LANES), rest) }.copy_from_slice(&all[..rest]);
            }
            i += 1;
        }
    }

    /// Writes `V` vectors of columns, the first of them number `i` from `start` on, to `rows`.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    fn block<S: Simd, const V: usize>(
        &self,
        simd: S,
        first: usize,
        start: usize,
        i: usize,
        rows: &[*mut T],
        scales: &[S::F32],
        offsets: &[S::F32],
    ) {
        let mask = (1u32 << (32 / PER_WORD)) - 1;
        let mut words = [simd.splat_word(0); V];
        for (v, words) in words.iter_mut().enumerate() {
            self.reader.prefetch(simd, first / PER_WORD + 1, start + (i + v) * LANES);
            *words = self.reader.words(simd, first / PER_WORD, start + (i + v) * LANES);
        }
        let (scales, offsets) = (&scales[i..i + V], &offsets[i..i + V]);
        for row in rows {
            for v in 0..V {
                let value = simd.mul_add(simd.to_f32(simd.and(words[v], mask)), scales[v], offsets[v]);
                // SAFETY: the row has these columns, which no other task has; nothing else borrows them.
                T::store(simd, value, unsafe { &mut *row.add((i + v) * LANES).cast() });
                words[v] = match PER_WORD {
                    8 => simd.shift_right::<4>(words[v]),
                    _ => simd.shift_right::<8>(words[v]),
                };
            }
        }
    }
}
