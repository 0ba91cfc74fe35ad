//! Dequantises a weight to floats, a few columns at a time.

use super::HostFloat;
use super::simd::{Kernel, LANES, Simd, dispatch};
use super::threads::{Columns, for_each};
use super::weight::Reader;
use marlin_format::WeightValue;
use std::ops::Range;

/// Maximum number of columns of a task, which keeps their scales in an array.
const STRIP: usize = 2048;

/// Removes the lowest value `q` of each word and returns `q scale + offset`, where the offset is
/// `-zero scale`. The next value becomes the lowest.
#[inline(always)]
fn take<S: Simd, const PER_WORD: usize, const FLOAT: bool>(
    simd: S,
    words: &mut S::U32,
    scales: S::F32,
    offsets: S::F32,
) -> S::F32 {
    let number = if FLOAT {
        take_float::<S, PER_WORD>(simd, words)
    } else {
        let lowest = simd.and(*words, (1u32 << (32 / PER_WORD)) - 1);
        *words = next::<S, PER_WORD>(simd, *words);
        simd.to_f32(lowest)
    };
    simd.mul_add(number, scales, offsets)
}

/// Shifts words to their next value.
#[inline(always)]
fn next<S: Simd, const PER_WORD: usize>(simd: S, words: S::U32) -> S::U32 {
    match PER_WORD {
        8 => simd.shift_right::<4>(words),
        _ => simd.shift_right::<8>(words),
    }
}

/// Removes the lowest code of each word, of e2m1 (eight per word) or e4m3, and returns its number.
///
/// The code's exponent and mantissa, moved to those of an f32 whose exponent is larger by the
/// difference of the biases, give a normal number. It is `2^e (1 + m)` where the code is subnormal,
/// too, with the value `2^(e + 1) m`: twice the number less `2^(e + 1)`. Up to the smallest normal
/// number, `2^(e + 1)`, this is the smaller of the two; from there on, the number itself is. So no
/// subnormal f32 occurs, with which processors are slow.
#[inline(always)]
pub fn take_float<S: Simd, const PER_WORD: usize>(simd: S, words: &mut S::U32) -> S::F32 {
    let (magnitude, sign, bias, normal) = match PER_WORD {
        8 => (
            simd.shift_left::<22>(simd.and(*words, 7)),
            simd.shift_left::<28>(*words),
            126 << 23,
            1.0,
        ),
        _ => (
            simd.shift_left::<20>(simd.and(*words, 0x7f)),
            simd.shift_left::<24>(*words),
            120 << 23,
            1.0 / 64.0,
        ),
    };
    *words = next::<S, PER_WORD>(simd, *words);
    let number = simd.bits_to_f32(magnitude, bias);
    let subnormal = simd.mul_add(number, simd.splat(2.0), simd.splat(-normal));
    simd.with_sign(simd.min(number, subnormal), sign)
}

/// Dequantises the values of words, row by row: `q scale + offset`.
#[inline(always)]
pub fn unpack<S: Simd, const PER_WORD: usize, const FLOAT: bool>(
    simd: S,
    mut words: S::U32,
    scales: S::F32,
    offsets: S::F32,
) -> [S::F32; PER_WORD] {
    let mut values = [offsets; PER_WORD];
    for value in &mut values {
        *value = take::<S, PER_WORD, FLOAT>(simd, &mut words, scales, offsets);
    }
    values
}

/// Rounds the lanes of a vector and stores them in `to`: all lanes, or as many as fit.
#[inline(always)]
fn store_part<S: Simd, T: HostFloat>(simd: S, vector: S::F32, to: &mut [T]) {
    match to.first_chunk_mut() {
        Some(to) => T::store(simd, vector, to),
        None => {
            let mut values = [T::default(); LANES];
            T::store(simd, vector, &mut values);
            to.copy_from_slice(&values[..to.len()]);
        }
    }
}

/// Writes the float weight [K, N] to `out`, in natural row order.
pub fn dequantize<T: HostFloat>(
    reader: &Reader<'_>,
    permutation: Option<&[u32]>,
    out: &mut [T],
    n: usize,
) {
    let (k, elements) = (out.len() / n.max(1), out.len());
    // A task is a chunk of K, so that threads write far from each other. With columns of the same
    // rows, they contended for cache lines (two threads were three times slower than one). Only
    // wide rows are split, at distances of pages.
    let strips = n.div_ceil(STRIP);
    let out = Columns::new(out, n);
    for_each(k.div_ceil(reader.chunk) * strips, elements, |task| {
        let (chunk, start) = (task / strips, task % strips * STRIP);
        let columns = start..n.min(start + STRIP);
        let strip = Strip {
            reader,
            permutation,
            out: &out,
            k,
            chunk,
            columns,
        };
        dispatch_values(reader.value, strip);
    });
}

/// A task on packed values, compiled once for each kind of values and each [`Simd`].
pub trait ValueKernel {
    /// Runs the task on words of `PER_WORD` values, floats or integers. The method must be
    /// `#[inline(always)]`, as [`Kernel::run`] must.
    fn run<S: Simd, const PER_WORD: usize, const FLOAT: bool>(self, simd: S);
}

/// A task for words of `PER_WORD` values, floats or integers.
struct Of<T, const PER_WORD: usize, const FLOAT: bool>(T);

impl<T: ValueKernel, const PER_WORD: usize, const FLOAT: bool> Kernel for Of<T, PER_WORD, FLOAT> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.0.run::<S, PER_WORD, FLOAT>(simd);
    }
}

/// Runs a task on values of a kind with the best instruction set of this processor.
pub fn dispatch_values<T: ValueKernel>(value: WeightValue, task: T) {
    match value {
        WeightValue::Int4 => dispatch(Of::<_, 8, false>(task)),
        WeightValue::Int8 => dispatch(Of::<_, 4, false>(task)),
        WeightValue::E2m1 => dispatch(Of::<_, 8, true>(task)),
        WeightValue::E4m3 => dispatch(Of::<_, 4, true>(task)),
    }
}

/// A task: a chunk of K of some columns.
struct Strip<'a, T> {
    reader: &'a Reader<'a>,
    permutation: Option<&'a [u32]>,
    out: &'a Columns<'a, T>,
    k: usize,
    chunk: usize,
    columns: Range<usize>,
}

impl<T: HostFloat> ValueKernel for Strip<'_, T> {
    #[inline(always)]
    fn run<S: Simd, const PER_WORD: usize, const FLOAT: bool>(self, simd: S) {
        let mut scaling = [(simd.splat(0.0), simd.splat(0.0)); STRIP / LANES];
        let scaling = &mut scaling[..self.columns.len().div_ceil(LANES)];
        for (i, scaling) in scaling.iter_mut().enumerate() {
            *scaling =
                self.reader
                    .scale_and_offset(simd, self.chunk, self.columns.start + i * LANES);
        }
        let start = self.chunk * self.reader.chunk;
        let end = self.k.min(start + self.reader.chunk);
        for first in (start..end).step_by(PER_WORD) {
            self.word_row::<S, PER_WORD, FLOAT>(simd, first, end, scaling);
        }
    }
}

impl<T: HostFloat> Strip<'_, T> {
    /// Writes the rows of K in one row of words, from `first` on and below `end`. `scaling` has the
    /// scale and offset of every vector of columns.
    #[inline(always)]
    fn word_row<S: Simd, const PER_WORD: usize, const FLOAT: bool>(
        &self,
        simd: S,
        first: usize,
        end: usize,
        scaling: &[(S::F32, S::F32)],
    ) {
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
        // Many columns of a row are written at once: this is a tenth faster than moving to another
        // row after each vector.
        while S::REGISTERS >= 32 && (i + 8) * LANES <= width {
            self.block::<S, PER_WORD, FLOAT, 8>(simd, first, i, rows, scaling);
            i += 8;
        }
        while (i + 2) * LANES <= width {
            self.block::<S, PER_WORD, FLOAT, 2>(simd, first, i, rows, scaling);
            i += 2;
        }
        while i * LANES < width {
            self.block::<S, PER_WORD, FLOAT, 1>(simd, first, i, rows, scaling);
            i += 1;
        }
    }

    /// Writes `V` vectors of columns, from vector `i` of the strip on, to `rows`. A single vector
    /// may be the last of the strip, with fewer columns.
    #[inline(always)]
    fn block<S: Simd, const PER_WORD: usize, const FLOAT: bool, const V: usize>(
        &self,
        simd: S,
        first: usize,
        i: usize,
        rows: &[*mut T],
        scaling: &[(S::F32, S::F32)],
    ) {
        let mut words = [simd.splat_word(0); V];
        for (v, words) in words.iter_mut().enumerate() {
            let column = self.columns.start + (i + v) * LANES;
            // Prefetches the next row of words: stores to many rows defeat the processor's own
            // prefetching.
            self.reader.prefetch(simd, first / PER_WORD + 1, column);
            *words = self.reader.words(simd, first / PER_WORD, column);
        }
        let width = if V == 1 {
            LANES.min(self.columns.len() - i * LANES)
        } else {
            LANES
        };
        for row in rows {
            for (v, (words, &(scales, offsets))) in
                words.iter_mut().zip(&scaling[i..i + V]).enumerate()
            {
                let value = take::<S, PER_WORD, FLOAT>(simd, words, scales, offsets);
                // SAFETY: the row has these columns, which no other task has; nothing else borrows
                // them.
                store_part(simd, value, unsafe {
                    std::slice::from_raw_parts_mut(row.add((i + v) * LANES), width)
                });
            }
        }
    }
}
