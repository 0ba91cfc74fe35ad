//! The zero points that go with the Marlin tile layout.

use super::{TileExtents, WordIndex};
use crate::{FormatError, GroupSize, WeightValue};

/// The layout of zero points: words `[G, N/8]` (4 bits) or `[G, N/4]` (8 bits), row-major. One word
/// (4 bits) or two words (8 bits) hold the eight zero points that a lane needs for a tile of 64
/// columns.
///
/// A lane dequantises column `groupID = lane / 4` of each of the eight blocks of 8 columns of a
/// tile. In every 64 columns:
///
/// | word | nibble 0 | 1 | ... | 7 | lanes |
/// |---|---|---|---|---|---|
/// | 0 | column 0 | 8  | ... | 56 | 0..4 |
/// | 1 | column 1 | 9  | ... | 57 | 4..8 |
/// | 7 | column 7 | 15 | ... | 63 | 28..32 |
///
/// For 8-bit values, words `2i` and `2i + 1` are the two halves of word `i`, with one byte for each
/// nibble.
///
/// Groups and columns are padded as in [`ScaleLayout`](super::ScaleLayout). The contents of the
/// padding do not matter, because the corresponding scale or activations are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ZeroLayout {
    k: usize,
    n: usize,
    groups: usize,
    groups_padded: usize,
    n_padded: usize,
    bits: WeightValue,
}

impl ZeroLayout {
    /// The layout of the zero points of a weight of `bits` in a tile layout, in groups of `group`.
    pub fn new(extents: impl Into<TileExtents>, group: GroupSize, bits: WeightValue) -> Self {
        let TileExtents {
            k,
            n,
            k_padded,
            n_padded,
        } = extents.into();
        Self {
            k,
            n,
            groups: group.count(k),
            groups_padded: group.count(k_padded),
            n_padded,
            bits,
        }
    }

    /// Returns the number of rows and columns of the words, including padding.
    pub const fn shape(&self) -> [usize; 2] {
        [self.groups_padded, self.n_padded / self.bits.per_word()]
    }

    /// Returns the total number of words, including padding.
    pub const fn words(&self) -> usize {
        let [rows, columns] = self.shape();
        rows.saturating_mul(columns)
    }

    /// Returns the index of the zero point of group `g`, column `n`, which may be in the padding.
    pub fn index(&self, g: usize, n: usize) -> WordIndex {
        // The number of zero points in a word, among the eight of a lane.
        let (per_word, [_, columns]) = (self.bits.per_word(), self.shape());
        let (lane_words, place) = (8 / per_word, n % 64 / 8);
        let word = g * columns + (n / 64 * 8 + n % 8) * lane_words + place / per_word;
        WordIndex {
            word,
            slot: place % per_word,
            bits: self.bits,
        }
    }

    /// Permutes, pads and packs the zero points `[G, N]`.
    ///
    /// # Errors
    /// [`FormatError::Length`] if the number of zero points is not G * N.
    pub fn pack(&self, zeros: &[u8]) -> Result<Vec<u32>, FormatError> {
        let (expected, found) = (self.groups.saturating_mul(self.n), zeros.len());
        if found != expected {
            return Err(FormatError::Length {
                what: "the zero points",
                k: self.k,
                n: self.n,
                expected,
                found,
            });
        }
        let mut words = vec![0; self.words()];
        for (position, &zero) in zeros.iter().enumerate() {
            self.index(position / self.n, position % self.n)
                .write(&mut words, zero);
        }
        Ok(words)
    }

    /// Undoes [`pack`](Self::pack).
    ///
    /// # Errors
    /// [`FormatError::Length`] if the number of words is not [`words`](Self::words).
    pub fn unpack(&self, words: &[u32]) -> Result<Vec<u8>, FormatError> {
        let (expected, found) = (self.words(), words.len());
        if found != expected {
            return Err(FormatError::Length {
                what: "the zero points in Marlin layout",
                k: self.k,
                n: self.n,
                expected,
                found,
            });
        }
        Ok((0..self.groups * self.n)
            .map(|position| self.index(position / self.n, position % self.n).read(words))
            .collect())
    }
}
