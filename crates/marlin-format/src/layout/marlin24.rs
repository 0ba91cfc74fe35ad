//! The tile layout of 2:4 sparse Marlin weights.

use super::WordIndex;
use super::tile::{TILE_K, TILE_N};
use crate::{FormatError, WeightValue};

/// The published layout of a 2:4 weight: the kept values, and metadata that name the rows of these
/// values.
///
/// **Kept values.** Of rows `4i..4i+4`, two values remain, in order, as kept rows `2i` and `2i+1`.
/// The kept values form a dense weight `[K/2, N]` in tiles of 16 x 64. The sparse operand of
/// `mma.sp` is the weight, not the activations. Therefore the columns of a fragment are 8
/// neighbours, and are in other lanes than in [`MarlinLayout`](super::MarlinLayout). With
/// `groupID = lane / 4` and `t = lane % 4`, word `j` of the four words of a lane (4 bits) holds:
///
/// | nibble | kept row in the tile | column in the tile |
/// |---|---|---|
/// | 0 | `2t`     | `8 groupID + j` |
/// | 4 | `2t + 1` | `8 groupID + j` |
/// | 1 | `2t + 8` | `8 groupID + j` |
/// | 5 | `2t + 9` | `8 groupID + j` |
/// | 2 | `2t`     | `8 groupID + j + 4` |
/// | 6 | `2t + 1` | `8 groupID + j + 4` |
/// | 3 | `2t + 8` | `8 groupID + j + 4` |
/// | 7 | `2t + 9` | `8 groupID + j + 4` |
///
/// For 8-bit values there are two words for each `j`: the first for column `j`, the second for
/// column `j + 4`:
///
/// | byte | 0 | 2 | 1 | 3 |
/// |---|---|---|---|---|
/// | kept row in the tile | `2t` | `2t + 1` | `2t + 8` | `2t + 9` |
///
/// **Metadata**, i16 `[K/32, 2N]`: one value covers 16 rows of a column, with one nibble for every
/// four rows, lowest nibble first. The lower two bits of a nibble are the index, among the four
/// rows, of the first kept value. The upper two bits are the index of the second kept value, which
/// comes later. The possible nibbles are 4, 8, 9, 12, 13 and 14. Row `r` of the metadata covers
/// both halves (first and second 16 rows) of rows `32r..32r+32`. In every 64 columns, position by
/// column:
///
/// | column          | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | ... | 63 |
/// |---|---|---|---|---|---|---|---|---|---|---|---|
/// | first 16 rows   | 0 | 4 | 64 | 68 | 1 | 5 | 65 | 69 | 8 | ... | 125 |
/// | second 16 rows  | 2 | 6 | 66 | 70 | 3 | 7 | 67 | 71 | 10 | ... | 127 |
///
/// **Scales** `[G, N]`. With several groups, in every 8 columns, position by column:
///
/// | column   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
/// |---|---|---|---|---|---|---|---|---|
/// | position | 0 | 2 | 4 | 6 | 1 | 3 | 5 | 7 |
///
/// The scales of a single group are in their natural order.
///
/// Sources: the packers of Sparse-Marlin's authors (IST-DASLab/Sparse-Marlin) and of
/// compressed-tensors 0.10 (`marlin_24.py`), and CUTLASS's reordering of metadata
/// (`host_reorder.h`), which both packers contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Marlin24Layout {
    k: usize,
    n: usize,
    bits: WeightValue,
}

impl Marlin24Layout {
    /// Creates the layout of a weight with `k` input features (before pruning) and `n` output
    /// features.
    ///
    /// # Errors
    /// [`FormatError::TileDoesNotDivide`] where K is not a multiple of 32 or N not of 64: the
    /// published formats do not pad.
    pub fn new(k: usize, n: usize, bits: WeightValue) -> Result<Self, FormatError> {
        for (axis, extent, tile) in [("K", k, 2 * TILE_K), ("N", n, TILE_N)] {
            if !extent.is_multiple_of(tile) {
                return Err(FormatError::TileDoesNotDivide { axis, extent, tile });
            }
        }
        Ok(Self { k, n, bits })
    }

    /// Returns the number of rows and columns of the words of kept values: `[K/32, 2N]` (4 bits) or
    /// `[K/32, 4N]` (8 bits).
    pub fn shape(&self) -> [usize; 2] {
        [
            self.k / (2 * TILE_K),
            self.n.saturating_mul(TILE_K) / self.bits.per_word(),
        ]
    }

    /// Returns the number of rows and columns of the metadata: `[K/32, 2N]`.
    pub fn metadata_shape(&self) -> [usize; 2] {
        [self.k / (2 * TILE_K), self.n.saturating_mul(2)]
    }

    /// Returns the index of the value of kept row `row` (below K/2), column `n`.
    pub fn index(&self, row: usize, n: usize) -> WordIndex {
        let tile = (row / TILE_K) * (self.n / TILE_N) + n / TILE_N;
        let (group_id, thread_in_group) = (n % TILE_N / 8, row % 8 / 2);
        let (lane, j) = (4 * group_id + thread_in_group, n % 4);
        // A lane's values of column j or j + 4 are two pairs: rows 2t, 2t + 1, and the rows eight
        // below these.
        let (second_column, second_pair, second_row) = (n % 8 / 4, row % TILE_K / 8, row % 2);
        let (word, slot) = match self.bits.bits() {
            4 => (
                4 * lane + j,
                2 * second_column + second_pair + 4 * second_row,
            ),
            _ => (
                8 * lane + 2 * j + second_column,
                second_pair + 2 * second_row,
            ),
        };
        let tile_words = TILE_K * TILE_N / self.bits.per_word();
        WordIndex {
            word: tile * tile_words + word,
            slot,
            bits: self.bits,
        }
    }

    /// Returns the index of the metadata of rows `16 * sixteen..16 * sixteen + 16` of column `n`.
    pub fn metadata_index(&self, sixteen: usize, n: usize) -> usize {
        let column = n / 64 * 64 + n % 2 * 2 + n % 8 / 4 + n % 4 / 2 * 32 + n % 64 / 8 * 4;
        // In every 2 x 2 block of `column` and `sixteen`, the two off-diagonal entries are swapped.
        let (column, second) = (column - column % 2 + sixteen % 2, column % 2);
        sixteen / 2 * 2 * self.n + 2 * column + second
    }

    /// Returns the index of the scale of group `g`, column `n`. If `permuted` is true, the columns
    /// are in the order that weights with several groups have.
    pub fn scale_index(&self, g: usize, n: usize, permuted: bool) -> usize {
        g * self.n
            + if permuted {
                n / 8 * 8 + n % 4 * 2 + n % 8 / 4
            } else {
                n
            }
    }
}
