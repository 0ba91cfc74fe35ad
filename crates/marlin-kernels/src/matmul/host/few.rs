//! The product of up to eight rows of activations. The weight is streamed from memory through
//! registers, and unpacked there.
//!
//! Value `i` of a word is masked in place, which gives `q 2^(bits i)`, and converted to float; its
//! activation carries the factor `2^(-bits i)`. A value therefore costs a mask, a conversion and a
//! multiply-add for a vector of columns, and no shift. Floats are converted one after the other,
//! without such factors. Zero points are subtracted once per chunk of
//! K: `sum x (q - zero) = sum x q - zero sum x`.

use super::float::add_product;
use super::simd::{LANES, Simd};
use super::threads::{Columns, for_each, strip};
use super::unpack::{ValueKernel, dispatch_values, take_float};
use super::weight::Reader;
use marlin_format::WeightValue;
use std::ops::Range;

/// Maximum number of rows.
pub const MAX_ROWS: usize = 8;
/// Maximum number of columns of a task.
const STRIP: usize = 256;
/// Minimum prefetch distance, in rows of K; longer chunks prefetch one chunk ahead. A strip's rows
/// lie apart in memory, which defeats the processor's own prefetching.
const AHEAD: usize = 128;

/// Activations in the order of the stored rows, prepared for words of a kind of values.
pub struct Activations {
    /// The activations times their factors, [rows, words * per_word]; zeros beyond K.
    scaled: Vec<f32>,
    /// The sums of the activations of each chunk, [rows, chunks].
    sums: Vec<f32>,
    words: usize,
    chunks: usize,
}

impl Activations {
    /// Prepares the activations `x` [rows, k].
    pub fn new(
        x: &[f32],
        k: usize,
        permutation: Option<&[u32]>,
        chunk: usize,
        value: WeightValue,
    ) -> Self {
        let (bits, per_word) = (value.bits(), value.per_word());
        let (words, chunks) = (k.div_ceil(per_word), k.div_ceil(chunk));
        let rows = x.len() / k.max(1);
        // The topmost value is shifted down: in place, a signed conversion would read it as
        // negative.
        let factors: Vec<f32> = (0..per_word)
            .map(|i| {
                if value.is_float() || i + 1 == per_word {
                    1.0
                } else {
                    (-((bits * i) as f32)).exp2()
                }
            })
            .collect();
        let mut scaled = vec![0.0; rows * words * per_word];
        let mut sums = Vec::with_capacity(rows * chunks);
        let mut gathered = Vec::new();
        for (scaled, row) in scaled
            .chunks_exact_mut((words * per_word).max(1))
            .zip(x.chunks_exact(k.max(1)))
        {
            let row = match permutation {
                Some(permutation) => {
                    gathered.clear();
                    gathered.extend(permutation.iter().map(|&natural| row[natural as usize]));
                    &gathered
                }
                None => row,
            };
            for (scaled, x) in scaled.chunks_exact_mut(per_word).zip(row.chunks(per_word)) {
                scaled
                    .iter_mut()
                    .zip(x.iter().zip(&factors))
                    .for_each(|(scaled, (x, factor))| *scaled = x * factor);
            }
            sums.extend(row.chunks(chunk).map(|chunk| chunk.iter().sum::<f32>()));
        }
        Self {
            scaled,
            sums,
            words,
            chunks,
        }
    }
}

/// Adds the product of activations with a weight to `out` [rows, n].
pub fn multiply(reader: &Reader<'_>, x: &Activations, out: &mut [f32], n: usize) {
    let rows = out.len() / n.max(1);
    let strip = strip(n, 4 * LANES, STRIP);
    let out = Columns::new(out, n);
    for_each(n.div_ceil(strip), x.scaled.len() * n, |task| {
        let columns = task * strip..n.min((task + 1) * strip);
        let strip = Strip {
            reader,
            x,
            out: &out,
            columns,
            rows,
        };
        dispatch_values(reader.value, strip);
    });
}

/// The task that computes a strip of columns.
struct Strip<'a> {
    reader: &'a Reader<'a>,
    x: &'a Activations,
    out: &'a Columns<'a, f32>,
    columns: Range<usize>,
    rows: usize,
}

impl ValueKernel for Strip<'_> {
    #[inline(always)]
    fn run<S: Simd, const PER_WORD: usize, const FLOAT: bool>(self, simd: S) {
        // Sums take half of the registers, and at most eight. With fewer sums, additions would wait
        // for each other; more rows bring no gain.
        let most_sums = (S::REGISTERS / 2).min(MAX_ROWS);
        let most_vectors = (most_sums / self.rows.next_power_of_two()).clamp(1, most_sums / 2);
        for chunk in 0..self.x.chunks {
            let mut column = self.columns.start;
            while column < self.columns.end {
                let vectors = most_vectors.min((self.columns.end - column).div_ceil(LANES));
                let vectors = if vectors == 3 { 2 } else { vectors };
                // If the rows do not fit at once, the words are read again from the first-level
                // cache.
                for row in (0..self.rows).step_by(most_sums) {
                    match most_sums.min(self.rows - row) {
                        1 => self.rows::<S, PER_WORD, FLOAT, 1>(simd, chunk, column, row, vectors),
                        2 => self.rows::<S, PER_WORD, FLOAT, 2>(simd, chunk, column, row, vectors),
                        3 => self.rows::<S, PER_WORD, FLOAT, 3>(simd, chunk, column, row, vectors),
                        4 => self.rows::<S, PER_WORD, FLOAT, 4>(simd, chunk, column, row, vectors),
                        5 => self.rows::<S, PER_WORD, FLOAT, 5>(simd, chunk, column, row, vectors),
                        6 => self.rows::<S, PER_WORD, FLOAT, 6>(simd, chunk, column, row, vectors),
                        7 => self.rows::<S, PER_WORD, FLOAT, 7>(simd, chunk, column, row, vectors),
                        _ => self.rows::<S, PER_WORD, FLOAT, MAX_ROWS>(
                            simd, chunk, column, row, vectors,
                        ),
                    }
                }
                column += vectors * LANES;
            }
        }
    }
}

impl Strip<'_> {
    #[inline(always)]
    fn rows<S: Simd, const PER_WORD: usize, const FLOAT: bool, const ROWS: usize>(
        &self,
        simd: S,
        chunk: usize,
        column: usize,
        row: usize,
        vectors: usize,
    ) {
        match vectors {
            4 if ROWS <= 2 => self.block::<S, PER_WORD, FLOAT, ROWS, 4>(simd, chunk, column, row),
            2 if ROWS <= 4 => self.block::<S, PER_WORD, FLOAT, ROWS, 2>(simd, chunk, column, row),
            _ => self.block::<S, PER_WORD, FLOAT, ROWS, 1>(simd, chunk, column, row),
        }
    }

    /// Adds to the output the products of one chunk for `ROWS` rows from `row` on and `C` vectors
    /// of columns from `column` on.
    #[inline(always)]
    fn block<
        S: Simd,
        const PER_WORD: usize,
        const FLOAT: bool,
        const ROWS: usize,
        const C: usize,
    >(
        &self,
        simd: S,
        chunk: usize,
        column: usize,
        row: usize,
    ) {
        let (reader, x) = (self.reader, self.x);
        let start = chunk * reader.chunk / PER_WORD;
        let end = x.words.min(((chunk + 1) * reader.chunk).div_ceil(PER_WORD));
        let ahead = reader.chunk.max(AHEAD) / PER_WORD;
        let rows: [&[[f32; PER_WORD]]; ROWS] = std::array::from_fn(|i| {
            &x.scaled[(row + i) * x.words * PER_WORD..][..x.words * PER_WORD]
                .as_chunks()
                .0[start..end]
        });
        let mut products = [[simd.splat(0.0); C]; ROWS];
        for word_row in 0..end - start {
            // Closures must not handle vectors: they would be separate functions, compiled without
            // these instructions.
            let mut words = [simd.splat_word(0); C];
            for (c, words) in words.iter_mut().enumerate() {
                reader.prefetch(simd, start + word_row + ahead, column + LANES * c);
                *words = reader.words(simd, start + word_row, column + LANES * c);
            }
            for i in 0..PER_WORD {
                let mut x = [simd.splat(0.0); ROWS];
                for (x, row) in x.iter_mut().zip(rows) {
                    *x = simd.splat(row[word_row][i]);
                }
                for c in 0..C {
                    let q = if FLOAT {
                        take_float::<S, PER_WORD>(simd, &mut words[c])
                    } else {
                        simd.to_f32(value::<S, PER_WORD>(simd, words[c], i))
                    };
                    for row in 0..ROWS {
                        products[row][c] = simd.mul_add(x[row], q, products[row][c]);
                    }
                }
            }
        }
        let mut scaling = [(simd.splat(0.0), simd.splat(0.0)); C];
        for (c, scaling) in scaling.iter_mut().enumerate() {
            *scaling = (
                reader.scales(simd, chunk, column + LANES * c),
                reader.zeros(simd, chunk, column + LANES * c),
            );
        }
        for (i, products) in products.into_iter().enumerate() {
            let minus_sum = simd.splat(-x.sums[(row + i) * x.chunks + chunk]);
            for (c, (product, (scales, zeros))) in products.into_iter().zip(scaling).enumerate() {
                let column = column + LANES * c;
                let centred = simd.mul_add(zeros, minus_sum, product);
                // SAFETY: no other task has these columns.
                let out = unsafe {
                    self.out
                        .part(row + i, column, LANES.min(self.columns.end - column))
                };
                add_product(simd, scales, centred, out);
            }
        }
    }
}

/// Extracts value `i` of words, times `2^(bits i)`; the topmost value without this factor.
#[inline(always)]
fn value<S: Simd, const PER_WORD: usize>(simd: S, words: S::U32, i: usize) -> S::U32 {
    let bits = 32 / PER_WORD;
    match (i + 1 == PER_WORD, PER_WORD) {
        (true, 8) => simd.shift_right::<28>(words),
        (true, _) => simd.shift_right::<24>(words),
        (false, _) => simd.and(words, ((1 << bits) - 1) << (bits * i)),
    }
}
