//! The float weight, a few columns at a time.

use super::HostFloat;
use super::simd::{Kernel, LANES, Simd, dispatch};
use super::threads::{Columns, for_each, strip};
use super::weight::Reader;
use std::ops::Range;

/// Most columns of a task.
const STRIP: usize = 256;

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
    let strip = strip(n, 8 * LANES, STRIP);
    let (k, elements) = (out.len() / n.max(1), out.len());
    let out = Columns::new(out, n);
    for_each(n.div_ceil(strip), elements, |task| {
        let columns = task * strip..n.min((task + 1) * strip);
        match per_word {
            8 => dispatch(Strip::<T, 8> { reader, permutation, out: &out, k, columns }),
            _ => dispatch(Strip::<T, 4> { reader, permutation, out: &out, k, columns }),
        }
    });
}

struct Strip<'a, T, const PER_WORD: usize> {
    reader: &'a Reader<'a>,
    permutation: Option<&'a [u32]>,
    out: &'a Columns<'a, T>,
    k: usize,
    columns: Range<usize>,
}

impl<T: HostFloat, const PER_WORD: usize> Kernel for Strip<'_, T, PER_WORD> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let zero = simd.splat(0.0);
        let (mut scales, mut offsets) = ([zero; STRIP / LANES], [zero; STRIP / LANES]);
        for start in (0..self.k).step_by(self.reader.chunk) {
            let (chunk, end) = (start / self.reader.chunk, self.k.min(start + self.reader.chunk));
            for (i, (scale, offset)) in scales.iter_mut().zip(&mut offsets).enumerate().take(self.columns.len().div_ceil(LANES)) {
                (*scale, *offset) = self.reader.scale_and_offset(simd, chunk, self.columns.start + i * LANES);
            }
            for first in (start..end).step_by(PER_WORD) {
                self.word_row(simd, first, end, &scales, &offsets);
            }
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
        let count = PER_WORD.min(end - first);
        for (i, (&scales, &offsets)) in scales.iter().zip(offsets).enumerate().take(width.div_ceil(LANES)) {
            let words = self.reader.words(simd, first / PER_WORD, start + i * LANES);
            let values = unpack::<S, PER_WORD>(simd, words, scales, offsets);
            // Apart, so that the loop is unrolled and the values stay in registers.
            if count == PER_WORD && (i + 1) * LANES <= width {
                for (row, value) in rows.into_iter().zip(values) {
                    // SAFETY: the row has these columns, which no other task has; nothing else borrows them.
                    T::store(simd, value, unsafe { &mut *row.add(i * LANES).cast() });
                }
            } else {
                for (row, value) in rows.into_iter().zip(values).take(count) {
                    let mut all = [T::default(); LANES];
                    T::store(simd, value, &mut all);
                    let rest = LANES.min(width - i * LANES);
                    // SAFETY: as above, of the columns that are left.
                    unsafe { std::slice::from_raw_parts_mut(row.add(i * LANES), rest) }.copy_from_slice(&all[..rest]);
                }
            }
        }
    }
}
