//! The metadata of 2:4 weights, beside the plain layout of their kept values.

use super::WordIndex;
use crate::Bits;

/// Words `[ceil(K/32), N rounded up to 8]`, row-major: nibble `i` of the word in row `r`, column
/// `n` names the two rows that are kept of the weight's rows `32r + 4i..32r + 4i + 4` in column
/// `n`.
///
/// The nibble's lower two bits are the index, among the four rows, of the first kept value, its
/// upper two bits that of the second, which comes later: six of the sixteen numbers occur, those of
/// the PTX ISA ("Sparse matrix storage"):
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
    /// The nibble of rows 0 and 1.
    pub const PADDING: u8 = 4;
    /// The nibbles that occur.
    pub const NIBBLES: [u8; 6] = [4, 8, 9, 12, 13, 14];
    /// A word of padding.
    pub const PADDING_WORD: u32 = 0x4444_4444;

    /// The layout of the metadata of a weight with `k` input features before pruning, and `n`
    /// output features.
    pub const fn new(k: usize, n: usize) -> Self {
        Self { k, n }
    }

    /// Rows and columns of words.
    pub const fn shape(&self) -> [usize; 2] {
        [self.k.div_ceil(32), self.n.div_ceil(8).saturating_mul(8)]
    }

    /// Words in all.
    pub fn words(&self) -> usize {
        let [rows, columns] = self.shape();
        rows.saturating_mul(columns)
    }

    /// Returns the index of the nibble of rows `4 * four..4 * four + 4` of column `n`.
    pub fn index(&self, four: usize, n: usize) -> WordIndex {
        WordIndex {
            word: four / 8 * self.shape()[1] + n,
            slot: four % 8,
            bits: Bits::Four,
        }
    }

    /// True if a nibble names two rows in ascending order.
    pub const fn is_valid(nibble: u8) -> bool {
        nibble & 3 < nibble >> 2
    }

    /// The first group of four rows, and its column, whose nibble names no two rows in ascending
    /// order, or is past K or N and not the padding.
    pub(crate) fn first_bad(&self, words: &[u32]) -> Option<(usize, usize)> {
        let [_, columns] = self.shape();
        let bad = |word: u32| {
            // The first place `a` is below the second `b`, bit by bit, in the lowest bit of each
            // nibble: without a branch, most words are fine.
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
