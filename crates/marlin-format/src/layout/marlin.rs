//! The tile layout of the Marlin kernels.

use super::tile::{TILE_K, TILE_N};
use super::{PlainLayout, TileExtents, WordIndex, gather_bits, scatter_bits};
use crate::{FormatError, PlainWeight, WeightValue};

/// The number of rows of a chunk: four tiles along K.
const CHUNK_K: usize = 64;
/// The number of words of one tile: four words for each of 32 lanes.
const TILE_WORDS: usize = 128;

/// The tile layout of the published Marlin format: words `[K/16, 2N]` of 4-bit values or
/// `[K/8, 2N]` of 8-bit values, row-major. The weights of one lane for a tile of 16 x 64 are 16
/// contiguous bytes.
///
/// The weight is padded to whole tiles (or more, see [`new_padded`](Self::new_padded)) with nibbles
/// of 8, or bytes of 128. Every tile is 128 words in the order of a warp's 32 lanes: four words for
/// each lane, which the lane loads as 16 bytes. Word `j` of a lane belongs to the 16 x 16 sub-tile
/// of columns `16j..16j+16`. The word holds the lane's eight weights of two `mma.m16n8k16` B
/// fragments (columns 0..8 and 8..16 of the sub-tile). No value ever moves between lanes.
///
/// With `groupID = lane / 4` and `t = lane % 4`, the names in the PTX ISA's figures, word `j` of a
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
/// This interleave is 64207531 in the paper: the values in nibbles 3, 2, 1, 0, then 7, 6, 5, 4. The
/// interleave places the two values of one f16x2 register 16 bits apart. `w & 0x000f000f` has `b0`
/// in its lower half and `b1` in its upper half; `w & 0x00f000f0` has `b2` and `b3`. The same masks
/// applied to `w >> 8` select the second fragment. A pair therefore becomes two f16 values without
/// moving either value.
///
/// [`in_chunks`](Self::in_chunks), a layout that no file has, exchanges the pair in nibbles 1 and 5
/// with the pair in nibbles 2 and 6. Then `w` has the rows `2t, 2t + 1`, and `w >> 8` has the rows
/// `2t + 8, 2t + 9`. The mask selects the column: `groupID` under `0x000f000f`, `8 + groupID` under
/// `0x00f000f0`. Some kernels multiply the masked bits directly as f16 numbers, so values under the
/// second mask are 16 times as large. In this order, all values of a column need the same
/// correction.
///
/// **8 bits**, used by kernels only: a tile is 8 rows by 64 columns, again 128 words. Two tiles,
/// one below the other, cover the rows of one tile of 4-bit values. Word `j` of a lane holds, for
/// the sub-tile of columns `16j..16j + 16`:
///
/// | byte | row k in the tile | column n in the tile |
/// |---|---|---|
/// | 0 | `2t`     | `16j + groupID`     |
/// | 1 | `2t + 1` | `16j + groupID`     |
/// | 2 | `2t`     | `16j + 8 + groupID` |
/// | 3 | `2t + 1` | `16j + 8 + groupID` |
///
/// **e2m1**, used by kernels only: the nibbles of 4-bit values, with the bits of each word in
/// [another order](super::scatter_bits). [`index`](Self::index) says the nibble before.
///
/// **e4m3**, used by kernels only: tiles of 8 bits, two of which, one below the other, cover 16
/// rows. Word `j` of a lane holds four rows of one column, `16j + groupID` in the upper tile and
/// `16j + 8 + groupID` in the lower one. `wgmma` of e4m3 takes such a word as it is; in f16 and
/// bf16, the two values of a register are 16 bits apart.
///
/// | byte | 0 | 1 | 2 | 3 |
/// |---|---|---|---|---|
/// | row k of the 16 | `2t` | `2t + 8` | `2t + 1` | `2t + 9` |
///
/// The lanes that hold the first eight columns of the sub-tile, by row and column; the second eight
/// columns have the same lanes:
///
/// | k \ n    | 0 | 1 | 2 | ... | 7 |
/// |---|---|---|---|---|---|
/// | 0, 1, 8, 9   | lane 0 | lane 4 | lane 8  | ... | lane 28 |
/// | 2, 3, 10, 11 | lane 1 | lane 5 | lane 9  | ... | lane 29 |
/// | 4, 5, 12, 13 | lane 2 | lane 6 | lane 10 | ... | lane 30 |
/// | 6, 7, 14, 15 | lane 3 | lane 7 | lane 11 | ... | lane 31 |
///
/// A tile of 8-bit values has only rows 0 to 7 of this table.
///
/// Sources: the packer of the Marlin paper's authors (IST-DASLab/marlin), and PTX ISA, "Matrix
/// Fragments for mma.m16n8k16 with floating point type", multiplicand B of `.f16`/`.bf16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MarlinLayout {
    k: usize,
    n: usize,
    bits: WeightValue,
    k_padded: usize,
    n_padded: usize,
    /// True if the pairs in a word step through the rows of a column first, as in published files.
    /// False if the pairs step through the columns of a row first.
    rows_first: bool,
}

impl MarlinLayout {
    /// Creates the layout of published files for a 4-bit weight with `k` input and `n` output
    /// features, padded to whole tiles of 16 x 64.
    pub fn new(k: usize, n: usize) -> Self {
        Self {
            k,
            n,
            bits: WeightValue::Int4,
            k_padded: round_up(k, TILE_K),
            n_padded: round_up(n, TILE_N),
            rows_first: true,
        }
    }

    /// Creates the layout of [`new`](Self::new), padded to multiples of `k_multiple` and
    /// `n_multiple`. The published Marlin format requires multiples of 128 and 256.
    ///
    /// # Errors
    /// [`FormatError::PadMultiple`] if a multiple is 0 or not a multiple of the tile (16, 64).
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
    pub fn in_chunks(k: usize, n: usize, bits: WeightValue) -> Self {
        Self {
            k,
            n,
            bits,
            k_padded: round_up(k, CHUNK_K),
            n_padded: round_up(n, TILE_N),
            rows_first: false,
        }
    }

    /// Returns K, the number of input features, without padding.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Returns N, the number of output features, without padding.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Returns K with its padding.
    pub fn k_padded(&self) -> usize {
        self.k_padded
    }

    /// Returns N with its padding.
    pub fn n_padded(&self) -> usize {
        self.n_padded
    }

    /// Returns the number of rows of a tile: 16 for 4-bit values, 8 for 8-bit values.
    pub const fn tile_rows(&self) -> usize {
        match self.bits.bits() {
            4 => TILE_K,
            _ => TILE_K / 2,
        }
    }

    /// Returns the number of rows and columns of the words.
    pub const fn shape(&self) -> [usize; 2] {
        [
            self.k_padded / self.tile_rows(),
            self.n_padded.saturating_mul(2),
        ]
    }

    /// Returns the total number of words.
    pub const fn words(&self) -> usize {
        let [rows, columns] = self.shape();
        rows.saturating_mul(columns)
    }

    /// Returns the index of the value of row `k`, column `n` of the padded weight.
    pub fn index(&self, k: usize, n: usize) -> WordIndex {
        let (row, column) = (k % 16, n % 16);
        // A column of e4m3 is in one of the two tiles of 16 rows.
        let tile_row = match self.bits {
            WeightValue::E4m3 => 2 * (k / 16) + column / 8,
            _ => k / self.tile_rows(),
        };
        let tile = tile_row * (self.n_padded / TILE_N) + n / TILE_N;
        let sub_tile = n % TILE_N / 16;
        let (group_id, thread_in_group) = (column % 8, row % 8 / 2);
        let lane = 4 * group_id + thread_in_group;
        let slot = match self.bits {
            // The pair (b0, b1) or (b2, b3) of the first or second fragment; its second value lies
            // four nibbles up.
            WeightValue::Int4 | WeightValue::E2m1 => {
                (if self.rows_first {
                    2 * (column / 8) + row / 8
                } else {
                    2 * (row / 8) + column / 8
                }) + 4 * (row % 2)
            }
            WeightValue::Int8 => 2 * (column / 8) + row % 2,
            WeightValue::E4m3 => 2 * (row % 2) + row / 8,
        };
        WordIndex {
            word: tile * TILE_WORDS + 4 * lane + sub_tile,
            slot,
            bits: self.bits,
        }
    }

    /// Packs the stored values of a weight into [`words`](Self::words) words in this layout. Rows
    /// keep their stored order; a row permutation is not undone. For a 2:4 weight, K of the layout
    /// is the number of rows that the weight stores.
    ///
    /// # Errors
    /// [`FormatError::LayoutBits`] if the weight has another bit width;
    /// [`FormatError::LayoutShape`] if the weight has another K or N.
    pub fn pack(&self, weight: &PlainWeight) -> Result<Vec<u32>, FormatError> {
        if weight.spec().value != self.bits {
            return Err(FormatError::LayoutBits {
                expected: self.bits,
                found: weight.spec().value,
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
        if self.bits.is_float() {
            words
                .iter_mut()
                .for_each(|word| *word = scatter_bits(*word, self.bits));
        }
        Ok(words)
    }

    /// Converts words in this layout to [`PlainLayout`], without this layout's padding.
    ///
    /// # Errors
    /// [`FormatError::Length`] if `words` does not have length [`words`](Self::words).
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
        let plain = PlainLayout::new(self.k, self.n, self.bits);
        if self.bits.is_float() {
            let gathered = |&word: &u32| gather_bits(word, self.bits);
            let words: Vec<u32> = words.iter().map(gathered).collect();
            return Ok(plain.pack_with(|row, column| self.index(row, column).read(&words)));
        }
        Ok(plain.pack_with(|row, column| self.index(row, column).read(words)))
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

/// Rounds `value` up to a multiple of `multiple`, and saturates where the result would overflow.
fn round_up(value: usize, multiple: usize) -> usize {
    value.div_ceil(multiple).saturating_mul(multiple)
}
