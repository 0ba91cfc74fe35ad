//! Layouts of the 4-bit or 8-bit values of a weight in packed 32-bit words.
//!
//! A layout is a type with one index function, from a row and column of the weight to a slot of a
//! word. Packing on the host calls the index function. Repacking on the device computes the
//! inverse, and tests compare the two.
//!
//! | layout | shape of the packed words | used by |
//! |---|---|---|
//! | [`PlainLayout`] | `[ceil(K/8), N rounded up to 8]`; 8 bits: `[ceil(K/4), ...]` | records, checkpoints, portable kernels |
//! | [`MarlinLayout`] | `[K/16, 2N]`, tiles of 16 x 64; 8 bits: `[K/8, 2N]` | tensor-core kernels; 4 bits: also published Marlin files |
//! | [`SparseLayout`] | words of [`MarlinLayout`] for K/2 rows, metadata `[K/64, 2N]` | 2:4 weights on tensor cores |
//! | [`MetadataLayout`] | `[ceil(K/32), N rounded up to 8]` | the metadata that go with [`PlainLayout`] |
//! | [`Marlin24Layout`] | `[K/32, 2N]`, tiles of 32 x 64; 8 bits: `[K/32, 4N]` | published 2:4 sparse files |
//! | [`ScaleLayout`] | `[G, N]`, columns permuted | the scales that go with [`MarlinLayout`] |
//! | [`ZeroLayout`] | `[G, N/8]`, 8 bits: `[G, N/4]`, columns permuted | the zero points that go with [`MarlinLayout`] |

mod floats;
mod marlin;
mod marlin24;
mod metadata;
mod plain;
mod scales;
mod sparse;
mod tile;
mod zeros;

pub use floats::{BitMove, bit_moves, gather_bits, scatter_bits};
pub use marlin::MarlinLayout;
pub use marlin24::Marlin24Layout;
pub use metadata::MetadataLayout;
pub use plain::PlainLayout;
pub use scales::ScaleLayout;
pub use sparse::SparseLayout;
pub use zeros::ZeroLayout;

pub(crate) use scales::gather;
pub(crate) use tile::{TILE_N, Tile, TileTable, exchange};

use crate::WeightValue;

/// The extents K and N of a weight in a tile layout, with and without padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileExtents {
    /// The number of input features (K).
    pub k: usize,
    /// The number of output features (N).
    pub n: usize,
    /// K with its padding.
    pub k_padded: usize,
    /// N with its padding.
    pub n_padded: usize,
}

/// The position of one value in a slice of packed words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WordIndex {
    /// The index of the word.
    pub word: usize,
    /// The slot in the word, 0..=7 (4 bits) or 0..=3 (8 bits), from the low end of the word. The
    /// value occupies the bits from `slot * count` to `slot * count + count - 1`, where `count` is
    /// the bit width.
    pub slot: usize,
    /// Width of the value.
    pub bits: WeightValue,
}

impl WordIndex {
    /// Returns the number of bits below the value in its word.
    pub fn shift(self) -> usize {
        self.bits.bits() * self.slot
    }

    /// Returns the value at this position in `words`, 0..=15 or 0..=255.
    ///
    /// # Panics
    /// Panics if `words` is shorter than the layout that created this index requires.
    pub fn read(self, words: &[u32]) -> u8 {
        (words[self.word] >> self.shift()) as u8 & self.bits.max()
    }

    /// Writes `q` to this position in `words`. Only the low bits of `q`, as many as the bit width,
    /// are used.
    ///
    /// # Panics
    /// Panics if `words` is shorter than the layout that created this index requires.
    pub fn write(self, words: &mut [u32], q: u8) {
        let (shift, max) = (self.shift(), self.bits.max());
        let word = &mut words[self.word];
        *word = (*word & !(u32::from(max) << shift)) | (u32::from(q & max) << shift);
    }
}
