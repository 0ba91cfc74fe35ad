//! The zero points that go with the Marlin tile layout.

use super::{TileExtents, WordIndex};
use crate::{Bits, FormatError, GroupSize};

/// Words `[G, N/8]`, of 8 bits `[G, N/4]`, row-major: one word, or two, hold the eight zero points
/// that a lane needs for a tile of 64 columns.
///
/// A lane dequantises column `groupID = lane / 4` of each of a tile's eight blocks of 8 columns. In
/// every 64 columns:
///
/// | word | nibble 0 | 1 | ... | 7 | lanes |
/// |---|---|---|---|---|---|
/// | 0 | column 0 | 8  | ... | 56 | 0..4 |
/// | 1 | column 1 | 9  | ... | 57 | 4..8 |
/// | 7 | column 7 | 15 | ... | 63 | 28..32 |
///
/// Of 8 bits, words `2i` and `2i + 1` are the two halves of word `i`, with a byte for each nibble.
///
/// Groups and columns are padded as [`ScaleLayout`](super::ScaleLayout) pads them; the contents of
/// padding do not matter, since its scale or its activations are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ZeroLayout {
    k: usize,
    n: usize,
    groups: usize,
    groups_padded: usize,
    n_padded: usize,
    bits: Bits,
}

impl ZeroLayout {
    /// The layout of the zero points of a weight of `bits` in a tile layout, in groups of `group`.
    pub fn new(extents: impl Into<TileExtents>, group: GroupSize, bits: Bits) -> Self {
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

    /// Rows and columns of the words, with padding.
    pub const fn shape(&self) -> [usize; 2] {
        [self.groups_padded, self.n_padded / self.bits.per_word()]
    }

    /// Words in all, with padding.
    pub const fn words(&self) -> usize {
        let [rows, columns] = self.shape();
        rows.saturating_mul(columns)
    }

    /// Returns the index of the zero point of group `g`, column `n`, padding included.
    pub fn index(&self, g: usize, n: usize) -> WordIndex {
        // Of a lane's eight, those in a word.
        let (per_word, [_, columns]) = (self.bits.per_word(), self.shape());
        let (lane_words, place) = (8 / per_word, n % 64 / 8);
        let word = g * columns + (n / 64 * 8 + n % 8) * lane_words + place / per_word;
        WordIndex {
            word,
            slot: place % per_word,
            bits: self.bits,
        }
    }

    /// Permutes, pads and packs `[G, N]` zero points.
    ///
    /// # Errors
    /// [`FormatError::Length`] where there are not G * N of them.
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
    /// [`FormatError::Length`] where there are not [`words`](Self::words) of them.
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
