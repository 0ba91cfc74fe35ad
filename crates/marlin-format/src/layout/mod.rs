//! The layouts of a weight's 4-bit or 8-bit values in packed 32-bit words.
//!
//! A layout is a type with one index function, from a weight's row and column to a slot of a word.
//! Host packing calls it; device repacking computes its inverse, and tests compare the two.
//!
//! | layout | shape of the packed words | used by |
//! |---|---|---|
//! | [`PlainLayout`] | `[ceil(K/8), N rounded up to 8]`; of 8 bits `[ceil(K/4), ...]` | records, checkpoints, portable kernels |
//! | [`MarlinLayout`] | `[K/16, 2N]`, tiles of 16 x 64; of 8 bits `[K/8, 2N]` | tensor-core kernels; of 4 bits published Marlin files |
//! | [`SparseLayout`] | words as above of K/2 rows, metadata `[K/64, 2N]` | 2:4 weights on tensor cores |
//! | [`MetadataLayout`] | `[ceil(K/32), N rounded up to 8]` | the metadata that go with [`PlainLayout`] |
//! | [`Marlin24Layout`] | `[K/32, 2N]`, tiles of 32 x 64; of 8 bits `[K/32, 4N]` | published 2:4 sparse files |
//! | [`ScaleLayout`] | `[G, N]`, columns permuted | the scales that go with [`MarlinLayout`] |
//! | [`ZeroLayout`] | `[G, N/8]`, of 8 bits `[G, N/4]`, columns permuted | the zero points that go with [`MarlinLayout`] |

mod marlin;
mod marlin24;
mod metadata;
mod plain;
mod scales;
mod sparse;
mod tile;
mod zeros;

pub use marlin::MarlinLayout;
pub use marlin24::Marlin24Layout;
pub use metadata::MetadataLayout;
pub use plain::PlainLayout;
pub use scales::ScaleLayout;
pub use sparse::SparseLayout;
pub use zeros::ZeroLayout;

pub(crate) use scales::gather;
pub(crate) use tile::{TILE_N, Tile, TileTable, exchange};

use crate::Bits;

/// K and N of a weight in a tile layout, with and without padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileExtents {
    /// K, input features.
    pub k: usize,
    /// N, output features.
    pub n: usize,
    /// K with its padding.
    pub k_padded: usize,
    /// N with its padding.
    pub n_padded: usize,
}

/// The position of one value in a slice of packed words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WordIndex {
    /// Index of the word.
    pub word: usize,
    /// Slot of the word, 0..=7 (4 bits) or 0..=3 (8 bits): bits `slot * count` to `slot * count +
    /// count - 1`, low first.
    pub slot: usize,
    /// Width of the value.
    pub bits: Bits,
}

impl WordIndex {
    /// The distance of the value's lowest bit from the word's.
    pub fn shift(self) -> usize {
        self.bits.count() * self.slot
    }

    /// The value at this place, 0..=15 or 0..=255.
    ///
    /// # Panics
    /// Panics if `words` is shorter than the layout that made this index requires.
    pub fn read(self, words: &[u32]) -> u8 {
        (words[self.word] >> self.shift()) as u8 & self.bits.max()
    }

    /// Puts `q` in this place: its low four bits where the layout has four.
    ///
    /// # Panics
    /// Panics if `words` is shorter than the layout that made this index requires.
    pub fn write(self, words: &mut [u32], q: u8) {
        let (shift, max) = (self.shift(), self.bits.max());
        let word = &mut words[self.word];
        *word = (*word & !(u32::from(max) << shift)) | (u32::from(q & max) << shift);
    }
}
