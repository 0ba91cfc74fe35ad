//! The tile layout of 2:4 weights for the sparse tensor cores.

use super::{MarlinLayout, MetadataLayout, TileExtents, WordIndex};
use crate::{FormatError, WeightValue};

/// The tile layout of a 2:4 weight: the kept values in [`MarlinLayout`], and the metadata as
/// `mma.sp` reads them from the lanes of a warp.
///
/// The two kept values of rows `4i..4i + 4` are stored rows `2i` and `2i + 1`. The stored rows form
/// a weight `[K/2, N]` in the tiles and chunks of [`MarlinLayout::in_chunks`]. A chunk is 128 rows
/// of K by 64 columns, of which 64 rows are stored. Fragment A of `mma.sp.m16n8k32` is that of
/// `mma.m16n8k16` on stored rows. A tile of 16 stored rows (for 8 bits, two tiles of 8) covers 32
/// rows of K. The tile is multiplied by one `mma.sp` for each of its four sub-tiles of 16 columns.
///
/// **Metadata**, words `[K/64, 2N]`, row-major, in tiles of 64 rows of K by 64 columns. A tile is
/// 128 words: four words for each lane, which the lane loads as 16 bytes. One register of a warp
/// holds the metadata of 32 rows for two sub-tiles. `mma.sp` with sparsity selector 0 reads the
/// metadata of lanes 0 and 1 of every four lanes; with selector 1, of lanes 2 and 3. With
/// `groupID = lane / 4`, `s = lane % 4 / 2` and `h = lane % 2`, word `2i + p` of a lane holds, for
/// sub-tile `j = 2p + s`:
///
/// | nibble | rows of K in the tile | column in the tile |
/// |---|---|---|
/// | 0 to 3 | `32i + 16h + 4 nibble`, and the three after it | `16j + groupID` |
/// | 4 to 7 | `32i + 16h + 4 (nibble - 4)`, and the three after it | `16j + groupID + 8` |
///
/// The lanes that hold a word, by rows and column of the sub-tile, for `s = 0`. For `s = 1`, the
/// lane is two higher:
///
/// | k \ n | 0, 8 | 1, 9 | 2, 10 | ... | 7, 15 |
/// |---|---|---|---|---|---|
/// | 0 to 15  | lane 0 | lane 4 | lane 8 | ... | lane 28 |
/// | 16 to 31 | lane 1 | lane 5 | lane 9 | ... | lane 29 |
///
/// Source: PTX ISA, "Sparse matrix storage" and "Matrix Fragments for sparse mma.m16n8k32 with .f16
/// and .bf16 types". `wgmma.mma_async.sp.m64nNk32` with A in registers reads the same fragments
/// from each of its four warps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SparseLayout {
    k: usize,
    values: MarlinLayout,
}

impl SparseLayout {
    /// The layout of a weight with `k` input features before pruning, and `n` output features,
    /// padded to whole chunks of 128 x 64.
    pub fn new(k: usize, n: usize, bits: WeightValue) -> Self {
        Self {
            k,
            values: MarlinLayout::in_chunks(k / 2, n, bits),
        }
    }

    /// Returns the layout of the kept values `[K/2, N]`.
    pub fn values(&self) -> MarlinLayout {
        self.values
    }

    /// Returns the number of rows and columns of the words of the metadata.
    pub fn metadata_shape(&self) -> [usize; 2] {
        [
            self.values.k_padded() / 32,
            self.values.n_padded().saturating_mul(2),
        ]
    }

    /// Returns the total number of words of the metadata.
    pub fn metadata_words(&self) -> usize {
        let [rows, columns] = self.metadata_shape();
        rows.saturating_mul(columns)
    }

    /// Returns the index of the metadata nibble of rows `4 * four..4 * four + 4` of column `n`,
    /// which may be in the padding.
    pub fn metadata_index(&self, four: usize, n: usize) -> WordIndex {
        let tile = (four / 16) * (self.values.n_padded() / 64) + n / 64;
        let (sub_tile, group_id, second_column) = (n % 64 / 16, n % 8, n % 16 / 8);
        let lane = 4 * group_id + 2 * (sub_tile % 2) + four % 8 / 4;
        let word = 2 * (four % 16 / 8) + sub_tile / 2;
        WordIndex {
            word: 128 * tile + 4 * lane + word,
            slot: 4 * second_column + four % 4,
            bits: WeightValue::Int4,
        }
    }

    /// Converts metadata from [`MetadataLayout`] to [`metadata_words`](Self::metadata_words) words
    /// in this layout.
    ///
    /// # Errors
    /// [`FormatError::Length`] if the length of `metadata` is not that of the [`MetadataLayout`].
    pub fn pack_metadata(&self, metadata: &[u32]) -> Result<Vec<u32>, FormatError> {
        let (plain, n) = (
            MetadataLayout::new(self.k, self.values.n()),
            self.values.n(),
        );
        if metadata.len() != plain.words() {
            let (expected, found) = (plain.words(), metadata.len());
            return Err(FormatError::Length {
                what: "the metadata",
                k: self.k,
                n,
                expected,
                found,
            });
        }
        let mut words = vec![MetadataLayout::PADDING_WORD; self.metadata_words()];
        for four in 0..self.k / 4 {
            for column in 0..n {
                self.metadata_index(four, column)
                    .write(&mut words, plain.index(four, column).read(metadata));
            }
        }
        Ok(words)
    }
}

impl From<&SparseLayout> for TileExtents {
    fn from(layout: &SparseLayout) -> Self {
        let values = TileExtents::from(&layout.values);
        Self {
            k: layout.k,
            k_padded: 2 * values.k_padded,
            ..values
        }
    }
}
