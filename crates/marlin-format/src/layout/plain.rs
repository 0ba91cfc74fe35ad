//! The layout of records and portable kernels.

use super::WordIndex;
use crate::WeightValue;
use rayon::prelude::*;

/// The plain layout: words `[ceil(K/8), N rounded up to 8]`, row-major. Nibble `i` of the word in
/// row `r`, column `n` is row `8r + i`, column `n` of the weight. The eight values of a word are
/// eight input features of one output feature, as in GPTQ files.
///
/// For 8-bit values, the words are `[ceil(K/4), N rounded up to 8]`, and byte `i` is row `4r + i`.
///
/// Rows past K and columns past N hold the [midpoint](WeightValue::midpoint): 8 or 128, 0 of
/// floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlainLayout {
    pub(crate) k: usize,
    pub(crate) n: usize,
    pub(crate) bits: WeightValue,
}

impl PlainLayout {
    /// The layout of a weight with `k` input and `n` output features, in values of `bits`.
    pub fn new(k: usize, n: usize, bits: WeightValue) -> Self {
        Self { k, n, bits }
    }

    /// Returns the number of rows of words: K / 8 (4 bits) or K / 4 (8 bits), rounded up.
    pub fn rows(&self) -> usize {
        self.k.div_ceil(self.bits.per_word())
    }

    /// Returns the number of columns of words: N rounded up to a multiple of 8.
    pub fn columns(&self) -> usize {
        self.n.div_ceil(8).saturating_mul(8)
    }

    /// Returns the total number of words.
    pub fn words(&self) -> usize {
        self.rows().saturating_mul(self.columns())
    }

    /// Returns the index of the value of row `k`, column `n`.
    pub fn index(&self, k: usize, n: usize) -> WordIndex {
        let per_word = self.bits.per_word();
        WordIndex {
            word: k / per_word * self.columns() + n,
            slot: k % per_word,
            bits: self.bits,
        }
    }

    /// Returns a mask of the bits whose values are rows below K, in the words of row `row`.
    pub(crate) fn rows_mask(&self, row: usize) -> u32 {
        let rows = self.k.saturating_sub(self.bits.per_word() * row);
        if rows >= self.bits.per_word() {
            u32::MAX
        } else {
            !(u32::MAX << (self.bits.bits() * rows))
        }
    }

    /// Writes the midpoint to all positions past K or N. `words` must have [`words`](Self::words)
    /// words.
    pub(crate) fn pad(&self, words: &mut [u32]) {
        let (columns, last_row, padding) =
            (self.columns(), self.rows() - 1, self.bits.padding_word());
        if self.n < columns {
            words
                .chunks_exact_mut(columns)
                .for_each(|line| line[self.n..].fill(padding));
        }
        let mask = self.rows_mask(last_row);
        words[last_row * columns..]
            .iter_mut()
            .for_each(|word| *word = (*word & mask) | (padding & !mask));
    }

    /// Returns words that hold only padding.
    pub(crate) fn padding(&self) -> Vec<u32> {
        vec![self.bits.padding_word(); self.words()]
    }

    /// Packs the values that `q(row, column)` returns, each 0..=15 or 0..=255. The padding is 8 or
    /// 128.
    pub fn pack_with(&self, q: impl Fn(usize, usize) -> u8 + Sync) -> Vec<u32> {
        let mut words = self.padding();
        let per_word = self.bits.per_word();
        words
            .par_chunks_exact_mut(self.columns().max(1))
            .enumerate()
            .for_each(|(line, words)| {
                let first = line * per_word;
                for row in first..self.k.min(first + per_word) {
                    for column in 0..self.n {
                        WordIndex {
                            word: column,
                            slot: row - first,
                            bits: self.bits,
                        }
                        .write(words, q(row, column));
                    }
                }
            });
        words
    }

    /// Returns the row and column of the first value that is NaN, if any. `words` must have
    /// [`words`](Self::words) words.
    pub(crate) fn first_nan(&self, words: &[u32]) -> Option<(usize, usize)> {
        if self.bits != WeightValue::E4m3 {
            return None;
        }
        // A byte is 0x7f or 0xff if the sum of its lowest seven bits and 1 reaches the eighth.
        let nan = |word: u32| ((word & 0x7f7f_7f7f) + 0x0101_0101) & 0x8080_8080;
        let index = crate::weight::position(words, |word| nan(word) != 0)?;
        let slot = nan(words[index]).trailing_zeros() as usize / 8;
        Some((
            index / self.columns() * self.bits.per_word() + slot,
            index % self.columns(),
        ))
    }

    /// Returns the index of the first word with a value past K or N that is not the midpoint, if
    /// any. `words` must have [`words`](Self::words) words.
    pub(crate) fn bad_padding(&self, words: &[u32]) -> Option<usize> {
        let columns = self.columns();
        for (row, line) in words.chunks_exact(columns.max(1)).enumerate() {
            let past_k = !self.rows_mask(row);
            // Most rows have padding only past N.
            let first = if past_k == 0 { self.n } else { 0 };
            for (column, &word) in line.iter().enumerate().skip(first) {
                let padding = if column < self.n { past_k } else { u32::MAX };
                if (word ^ self.bits.padding_word()) & padding != 0 {
                    return Some(row * columns + column);
                }
            }
        }
        None
    }
}
