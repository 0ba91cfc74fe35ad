//! The metadata of 2:4 weights whose kept values are in the plain layout.

use super::WordIndex;
use crate::WeightValue;

/// The layout of 2:4 metadata: words `[ceil(K/32), N rounded up to 8]`, row-major. Nibble `i` of
/// the word in row `r`, column `n` names the two kept rows among rows `32r + 4i..32r + 4i + 4` of
/// column `n` of the weight.
///
/// The lower two bits of a nibble are the index, among the four rows, of the first kept value. The
/// upper two bits are the index of the second kept value, which comes later. Six of the sixteen
/// nibbles are valid, as in the PTX ISA ("Sparse matrix storage"):
///
/// | nibble | 4 | 8 | 12 | 9 | 13 | 14 |
/// |---|---|---|---|---|---|---|
/// | rows kept | 0, 1 | 0, 2 | 0, 3 | 1, 2 | 1, 3 | 2, 3 |
///
/// Rows past K and columns past N hold [`PADDING`](Self::PADDING).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MetadataLayout {
    k: usize,
    n: usize,
}

impl MetadataLayout {
    /// The nibble of padding, which names rows 0 and 1.
    pub const PADDING: u8 = 4;
    /// The valid nibbles, in ascending order.
    pub const NIBBLES: [u8; 6] = [4, 8, 9, 12, 13, 14];
    /// A word whose eight nibbles are [`PADDING`](Self::PADDING).
    pub const PADDING_WORD: u32 = 0x4444_4444;

    /// Creates the layout of the metadata of a weight with `k` input features (before pruning) and
    /// `n` output features.
    pub const fn new(k: usize, n: usize) -> Self {
        Self { k, n }
    }

    /// Returns the number of rows and columns of the words.
    pub const fn shape(&self) -> [usize; 2] {
        [self.k.div_ceil(32), self.n.div_ceil(8).saturating_mul(8)]
    }

    /// Returns the total number of words.
    pub fn words(&self) -> usize {
        let [rows, columns] = self.shape();
        rows.saturating_mul(columns)
    }

    /// Returns the index of the nibble of rows `4 * four..4 * four + 4` of column `n`.
    pub fn index(&self, four: usize, n: usize) -> WordIndex {
        WordIndex {
            word: four / 8 * self.shape()[1] + n,
            slot: four % 8,
            bits: WeightValue::Int4,
        }
    }

    /// Returns true if a nibble names two rows in ascending order.
    pub const fn is_valid(nibble: u8) -> bool {
        nibble & 3 < nibble >> 2
    }

    /// Returns the first invalid nibble, as the index of its group of four rows and its column. A
    /// nibble is invalid if it does not name two rows in ascending order, or is past K or N and
    /// differs from the padding.
    pub(crate) fn first_bad(&self, words: &[u32]) -> Option<(usize, usize)> {
        let [_, columns] = self.shape();
        let bad = |word: u32| {
            // Tests in the lowest bit of each nibble, bit by bit, whether the first index `a` is
            // below the second index `b`. All eight nibbles are tested without a branch, because
            // most words are valid.
            let (a0, a1, b0, b1) = (word, word >> 1, word >> 2, word >> 3);
            let is_below = (!a1 & b1) | (!(a1 ^ b1) & !a0 & b0);
            !is_below & 0x1111_1111 != 0
        };
        let fours = self.k / 4;
        words.iter().enumerate().find_map(|(place, &word)| {
            let (row, column) = (place / columns, place % columns);
            let is_padded = column >= self.n || 8 * (row + 1) > fours;
            if !is_padded && !bad(word) {
                return None;
            }
            let nibble = |slot: usize| (word >> (4 * slot)) as u8 & 15;
            (0..8)
                .map(|slot| (8 * row + slot, nibble(slot)))
                .find_map(|(four, nibble)| {
                    let is_padding = column >= self.n || four >= fours;
                    let is_fine = if is_padding {
                        nibble == Self::PADDING
                    } else {
                        Self::is_valid(nibble)
                    };
                    (!is_fine).then_some((four, column))
                })
        })
    }
}
