//! The tile layout of the Marlin kernels.

use super::tile::{TILE_K, TILE_N};
use super::{PlainLayout, TileExtents, WordIndex};
use crate::{Bits, FormatError, PlainWeight};

/// Rows of a chunk: four tiles along K.
const CHUNK_K: usize = 64;
/// Words of one tile: 32 lanes, four words each.
const TILE_WORDS: usize = 128;

/// Words `[K/16, 2N]` of 4 bits, `[K/8, 2N]` of 8, row-major, as in the published Marlin format:
/// one lane's weights for a tile of 16 x 64 are 16 contiguous bytes.
///
/// The weight is padded to whole tiles (or more, see [`new_padded`](Self::new_padded)) with nibbles
/// of 8, or bytes of 128. Every tile is 128 words: four for each of a warp's 32 lanes, one 16-byte
/// load a lane, in the order of the lanes. Word `j` of a lane belongs to the 16 x 16 sub-tile of
/// columns `16j..16j+16`. It holds the lane's eight weights of two `mma.m16n8k16` B fragments
/// (columns 0..8 and 8..16 of the sub-tile), so that no value ever moves between lanes.
///
/// With `groupID = lane / 4` and `t = lane % 4`, the names of the PTX ISA's figures, word `j` of a
/// lane holds:
///
/// | nibble | row k in the tile | column n in the tile | B fragment element |
/// |---|---|---|---|
/// | 0 | `2t`     | `16j + groupID`     | first `b0` |
/// | 4 | `2t + 1` | `16j + groupID`     | first `b1` |
/// | 1 | `2t + 8` | `16j + groupID`     | first `b2` |
/// | 5 | `2t + 9` | `16j + groupID`     | first `b3` |
/// | 2 | `2t`     | `16j + 8 + groupID` | second `b0` |
/// | 6 | `2t + 1` | `16j + 8 + groupID` | second `b1` |
/// | 3 | `2t + 8` | `16j + 8 + groupID` | second `b2` |
/// | 7 | `2t + 9` | `16j + 8 + groupID` | second `b3` |
///
/// This interleave (64207531 in the paper: the values in nibbles 3, 2, 1, 0, then 7, 6, 5, 4) puts
/// the two values of one f16x2 register 16 bits apart: `w & 0x000f000f` has `b0` in its lower and
/// `b1` in its upper half, `w & 0x00f000f0` has `b2` and `b3`, and the same of `w >> 8` the second
/// fragment. So a pair becomes halves without moving either value.
///
/// [`in_chunks`](Self::in_chunks), which no file has, exchanges the pairs in nibbles 1, 5 and 2, 6.
/// Then `w` and `w >> 8` have the rows `2t, 2t + 1` and `2t + 8, 2t + 9`, and the mask selects the
/// column: `groupID` under `0x000f000f`, `8 + groupID` under `0x00f000f0`. Kernels that multiply
/// the masked nibbles as the numbers they are in f16, the second 16 times the first, so have one
/// unit for each column.
///
/// **8 bits**, which only kernels have: a tile is 8 rows by 64 columns, 128 words again, so two
/// tiles, one below the other, are the rows of one of 4 bits. Word `j` of a lane holds of the
/// sub-tile of columns `16j..16j + 16`:
///
/// | byte | row k in the tile | column n in the tile |
/// |---|---|---|
/// | 0 | `2t`     | `16j + groupID`     |
/// | 1 | `2t + 1` | `16j + groupID`     |
/// | 2 | `2t`     | `16j + 8 + groupID` |
/// | 3 | `2t + 1` | `16j + 8 + groupID` |
///
/// Lanes of the sub-tile's first eight columns, by row and column (the second eight are alike):
///
/// | k \ n    | 0 | 1 | 2 | ... | 7 |
/// |---|---|---|---|---|---|
/// | 0, 1, 8, 9   | lane 0 | lane 4 | lane 8  | ... | lane 28 |
/// | 2, 3, 10, 11 | lane 1 | lane 5 | lane 9  | ... | lane 29 |
/// | 4, 5, 12, 13 | lane 2 | lane 6 | lane 10 | ... | lane 30 |
/// | 6, 7, 14, 15 | lane 3 | lane 7 | lane 11 | ... | lane 31 |
///
/// A tile of 8 bits has the rows 0 to 7 of them.
///
/// Sources: the packer of the Marlin paper's authors (IST-DASLab/marlin), and PTX ISA, "Matrix
/// Fragments for mma.m16n8k16 with floating point type", multiplicand B of `.f16`/`.bf16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MarlinLayout {
    k: usize,
    n: usize,
    bits: Bits,
    k_padded: usize,
    n_padded: usize,
    /// True if the pairs of a word go by rows of a column first, as published; false if by columns
    /// of a row.
    rows_first: bool,
}

impl MarlinLayout {
    /// The layout of a weight of `k` input and `n` output features in 4 bits, padded to whole tiles
    /// of 16 x 64, as files have it.
    pub fn new(k: usize, n: usize) -> Self {
        Self {
            k,
            n,
            bits: Bits::Four,
            k_padded: round_up(k, TILE_K),
            n_padded: round_up(n, TILE_N),
            rows_first: true,
        }
    }

    /// The same, padded to multiples of `k_multiple` and `n_multiple`: the published Marlin format
    /// requires 128 and 256.
    ///
    /// # Errors
    /// [`FormatError::PadMultiple`] where a multiple is 0 or not a multiple of the tile (16, 64).
    pub fn new_padded(
        k: usize,
        n: usize,
        k_multiple: usize,
        n_multiple: usize,
    ) -> Result<Self, FormatError> {
        for (axis, multiple, tile) in [("K", k_multiple, TILE_K), ("N", n_multiple, TILE_N)] {
            if multiple == 0 || !multiple.is_multiple_of(tile) {
                return Err(FormatError::PadMultiple {
                    axis,
                    multiple,
                    tile,
                });
            }
        }
        Ok(Self {
            k_padded: round_up(k, k_multiple),
            n_padded: round_up(n, n_multiple),
            ..Self::new(k, n)
        })
    }

    /// The layout of the tensor-core kernels: pairs of nibbles in their own order (see above),
    /// padded to whole chunks of 64 x 64, which a warp reads at a time.
    pub fn in_chunks(k: usize, n: usize, bits: Bits) -> Self {
        Self {
            k,
            n,
            bits,
            k_padded: round_up(k, CHUNK_K),
            n_padded: round_up(n, TILE_N),
            rows_first: false,
        }
    }

    /// K, input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// N, output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// K with its padding.
    pub fn k_padded(&self) -> usize {
        self.k_padded
    }

    /// N with its padding.
    pub fn n_padded(&self) -> usize {
        self.n_padded
    }

    /// Rows of a tile: 16, or of 8 bits 8.
    pub const fn tile_rows(&self) -> usize {
        match self.bits {
            Bits::Four => TILE_K,
            Bits::Eight => TILE_K / 2,
        }
    }

    /// Rows and columns of the words.
    pub const fn shape(&self) -> [usize; 2] {
        [
            self.k_padded / self.tile_rows(),
            self.n_padded.saturating_mul(2),
        ]
    }

    /// Words in all.
    pub const fn words(&self) -> usize {
        let [rows, columns] = self.shape();
        rows.saturating_mul(columns)
    }

    /// Returns the index of the value of row `k`, column `n` of the padded weight.
    pub fn index(&self, k: usize, n: usize) -> WordIndex {
        let tile = (k / self.tile_rows()) * (self.n_padded / TILE_N) + n / TILE_N;
        let (row, column) = (k % 16, n % 16);
        let sub_tile = n % TILE_N / 16;
        let (group_id, thread_in_group) = (column % 8, row % 8 / 2);
        let lane = 4 * group_id + thread_in_group;
        let slot = match self.bits {
            // The pair (b0, b1) or (b2, b3) of the first or second fragment; its second value lies
            // four nibbles up.
            Bits::Four => {
                (if self.rows_first {
                    2 * (column / 8) + row / 8
                } else {
                    2 * (row / 8) + column / 8
                }) + 4 * (row % 2)
            }
            Bits::Eight => 2 * (column / 8) + row % 2,
        };
        WordIndex {
            word: tile * TILE_WORDS + 4 * lane + sub_tile,
            slot,
            bits: self.bits,
        }
    }

    /// The weight's stored values in this layout: [`words`](Self::words) words. Rows keep their
    /// order; a row permutation is not undone. Of a 2:4 weight, K is the number of rows that it
    /// stores.
    ///
    /// # Errors
    /// [`FormatError::LayoutBits`] where the weight has another width, [`FormatError::LayoutShape`]
    /// where it has another K or N.
    pub fn pack(&self, weight: &PlainWeight) -> Result<Vec<u32>, FormatError> {
        if weight.spec().bits != self.bits {
            return Err(FormatError::LayoutBits {
                expected: self.bits,
                found: weight.spec().bits,
            });
        }
        let (found_k, found_n) = (weight.layout().k, weight.n());
        if (found_k, found_n) != (self.k, self.n) {
            return Err(FormatError::LayoutShape {
                k: self.k,
                n: self.n,
                found_k,
                found_n,
            });
        }
        let mut words = vec![self.bits.padding_word(); self.words()];
        for row in 0..self.k {
            for column in 0..self.n {
                self.index(row, column)
                    .write(&mut words, weight.q(row, column));
            }
        }
        Ok(words)
    }

    /// The same values in [`PlainLayout`], without this layout's padding.
    ///
    /// # Errors
    /// [`FormatError::Length`] where `words` is not [`words`](Self::words) long.
    pub fn unpack(&self, words: &[u32]) -> Result<Vec<u32>, FormatError> {
        if words.len() != self.words() {
            let (expected, found) = (self.words(), words.len());
            return Err(FormatError::Length {
                what: "the weight in Marlin layout",
                k: self.k,
                n: self.n,
                expected,
                found,
            });
        }
        Ok(PlainLayout::new(self.k, self.n, self.bits)
            .pack_with(|row, column| self.index(row, column).read(words)))
    }
}

impl From<&MarlinLayout> for TileExtents {
    fn from(layout: &MarlinLayout) -> Self {
        let MarlinLayout {
            k,
            n,
            k_padded,
            n_padded,
            ..
        } = *layout;
        Self {
            k,
            n,
            k_padded,
            n_padded,
        }
    }
}

/// Saturates on sizes that no memory holds, in place of an overflow.
fn round_up(value: usize, multiple: usize) -> usize {
    value.div_ceil(multiple).saturating_mul(multiple)
}
