//! Up to eight rows of activations: the weight streams from memory through registers, and is unpacked there.
//!
//! Of a word, value `i` is masked where it lies, `q 2^(bits i)`, and made a float; the activation it meets carries the factor `2^(-bits i)`. So a
//! value costs a mask, a conversion and a multiply-add for eight columns, and no shift. Zero points are taken away a chunk of K at a time:
//! `sum x (q - zero) = sum x q - zero sum x`.

use super::simd::{Kernel, LANES, Simd, dispatch};
use super::threads::{Columns, for_each, strip};
use super::weight::Reader;
use std::ops::Range;

/// Most rows.
pub const MAX_ROWS: usize = 8;
/// Most columns of a task: their sums of eight rows fill 8 KiB.
const STRIP: usize = 256;
/// Most vectors of columns whose sums are in registers, which hold eight sums: with fewer, additions would wait for each other.
const VECTORS: usize = 4;

/// Activations in the order of the stored rows, prepared for words of `per_word` values.
pub struct Activations {
    /// [rows, words * per_word], with the factors; zeros past K.
    scaled: Vec<f32>,
    /// [rows, chunks].
    sums: Vec<f32>,
    words: usize,
    chunks: usize,
}

impl Activations {
    /// Of `x` [rows, k].
    pub fn new(x: &[f32], k: usize, permutation: Option<&[u32]>, chunk: usize, per_word: usize) -> Self {
        let (words, chunks) = (k.div_ceil(per_word), k.div_ceil(chunk));
        let rows = x.len() / k.max(1);
        let bits = 32 / per_word;
        // The topmost value is shifted down: as it lies a signed conversion would take it for negative.
        let factors: Vec<f32> = (0..per_word).map(|i| if i + 1 == per_word { 1.0 } else { (-((bits * i) as f32)).exp2() }).collect();
        let mut scaled = vec![0.0; rows * words * per_word];
        let mut sums = Vec::with_capacity(rows * chunks);
        let mut gathered = Vec::new();
        for (scaled, row) in scaled.chunks_exact_mut((words * per_word).max(1)).zip(x.chunks_exact(k.max(1))) {
            let row = match permutation {
                Some(permutation) => {
                    gathered.clear();
                    gathered.extend(permutation.iter().map(|&natural| row[natural as usize]));
                    &gathered
                }
                None => row,
            };
            for (scaled, x) in scaled.chunks_exact_mut(per_word).zip(row.chunks(per_word)) {
                scaled.iter_mut().zip(x.iter().zip(&factors)).for_each(|(scaled, (x, factor))| *scaled = x * factor);
            }
            sums.extend(row.chunks(chunk).map(|chunk| chunk.iter().sum::<f32>()));
        }
        Self { scaled, sums, words, chunks }
    }
}

/// Adds the product of activations with a weight to `out` [rows, n].
pub fn multiply(reader: &Reader<'_>, per_word: usize, x: &Activations, out: &mut [f32], n: usize) {
    let rows = out.len() / n.max(1);
    let strip = strip(n, 8 * VECTORS, STRIP);
    let out = Columns::new(out, n);
    for_each(n.div_ceil(strip), x.scaled.len() * n, |task| {
        let columns = task * strip..n.min((task + 1) * strip);
        match per_word {
            8 => run::<8>(reader, x, &out, columns, rows),
            _ => run::<4>(reader, x, &out, columns, rows),
        }
    });
}

fn run<const PER_WORD: usize>(reader: &Reader<'_>, x: &Activations, out: &Columns<'_, f32>, columns: Range<usize>, rows: usize) {
    match rows {
        1 => dispatch(Strip::<1, PER_WORD> { reader, x, out, columns }),
        2 => dispatch(Strip::<2, PER_WORD> { reader, x, out, columns }),
        3 => dispatch(Strip::<3, PER_WORD> { reader, x, out, columns }),
        4 => dispatch(Strip::<4, PER_WORD> { reader, x, out, columns }),
        5 => dispatch(Strip::<5, PER_WORD> { reader, x, out, columns }),
        6 => dispatch(Strip::<6, PER_WORD> { reader, x, out, columns }),
        7 => dispatch(Strip::<7, PER_WORD> { reader, x, out, columns }),
        _ => dispatch(Strip::<MAX_ROWS, PER_WORD> { reader, x, out, columns }),
    }
}

/// A strip of columns.
struct Strip<'a, const ROWS: usize, const PER_WORD: usize> {
    reader: &'a Reader<'a>,
    x: &'a Activations,
    out: &'a Columns<'a, f32>,
    columns: Range<usize>,
}

impl<const ROWS: usize, const PER_WORD: usize> Kernel for Strip<'_, ROWS, PER_WORD> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.columns.len().next_multiple_of(LANES);
        let mut sums = [[0.0f32; STRIP]; ROWS];
        // Chunk by chunk: as many streams as a chunk has rows of words, which the prefetcher follows.
        for chunk in 0..self.x.chunks {
            let mut column = 0;
            while ROWS <= 2 && column + VECTORS * LANES <= width {
                self.block::<S, VECTORS>(simd, chunk, column, &mut sums);
                column += VECTORS * LANES;
            }
            while ROWS <= 4 && column + VECTORS / 2 * LANES <= width {
                self.block::<S, { VECTORS / 2 }>(simd, chunk, column, &mut sums);
                column += VECTORS / 2 * LANES;
            }
            while column < width {
                self.block::<S, 1>(simd, chunk, column, &mut sums);
                column += LANES;
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            // SAFETY: no other task has these columns.
            let out = unsafe { self.out.part(row, self.columns.start, self.columns.len()) };
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
        }
    }
}

impl<const ROWS: usize, const PER_WORD: usize> Strip<'_, ROWS, PER_WORD> {
    /// Adds a chunk's products with `C` vectors of columns, `first` columns into the strip.
    #[inline(always)]
    fn block<S: Simd, const C: usize>(&self, simd: S, chunk: usize, first: usize, sums: &mut [[f32; STRIP]; ROWS]) {
        let (reader, x, column) = (self.reader, self.x, self.columns.start + first);
        let start = chunk * reader.chunk / PER_WORD;
        let end = x.words.min(((chunk + 1) * reader.chunk).div_ceil(PER_WORD));
        let rows: [&[[f32; PER_WORD]]; ROWS] =
            std::array::from_fn(|row| &x.scaled[row * x.words * PER_WORD..][..x.words * PER_WORD].as_chunks().0[start..end]);
        let mut products = [[simd.splat(0.0); C]; ROWS];
        for word_row in 0..end - start {
            // No closures around vectors: they would be functions that are compiled without these instructions.
            let mut words = [simd.splat_word(0); C];
            for (c, words) in words.iter_mut().enumerate() {
                *words = reader.words(simd, start + word_row, column + LANES * c);
            }
            for i in 0..PER_WORD {
                let mut x = [simd.splat(0.0); ROWS];
                for (x, row) in x.iter_mut().zip(rows) {
                    *x = simd.splat(row[word_row][i]);
                }
                for c in 0..C {
                    let q = simd.to_f32(value::<S, PER_WORD>(simd, words[c], i));
                    for row in 0..ROWS {
                        products[row][c] = simd.mul_add(x[row], q, products[row][c]);
                    }
                }
            }
        }
        for c in 0..C {
            let (scales, zeros) = (reader.scales(simd, chunk, column + LANES * c), reader.zeros(simd, chunk, column + LANES * c));
            for row in 0..ROWS {
                let minus_sum = simd.splat(-x.sums[row * x.chunks + chunk]);
                let centred = simd.mul_add(zeros, minus_sum, products[row][c]);
                let Some(of_row) = sums[row][first + LANES * c..].first_chunk_mut() else { continue };
                let sum = simd.mul_add(scales, centred, simd.load(of_row));
                simd.store(sum, of_row);
            }
        }
    }
}

/// Value `i` of words, times `2^(bits i)`, the topmost as it is.
#[inline(always)]
fn value<S: Simd, const PER_WORD: usize>(simd: S, words: S::U32, i: usize) -> S::U32 {
    let bits = 32 / PER_WORD;
    match (i + 1 == PER_WORD, PER_WORD) {
        (true, 8) => simd.shift_right::<28>(words),
        (true, _) => simd.shift_right::<24>(words),
        (false, _) => simd.and(words, ((1 << bits) - 1) << (bits * i)),
    }
}
