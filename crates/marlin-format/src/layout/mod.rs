//! Where a weight's 4-bit values lie in packed 32-bit words.
//!
//! A layout is a type with one index function, from a weight's row and column to a word and a nibble. Host packing, device repacking and
//! tests all call it.
//!
//! | layout | shape of the packed words | used by |
//! |---|---|---|
//! | [`PlainLayout`] | `[ceil(K/8), N rounded up to 8]` | records, checkpoints, portable kernels |
//! | [`MarlinLayout`] | `[K/16, 2N]`, tiles of 16 x 64 | tensor-core kernels, published Marlin files |
//! | [`ScaleLayout`] | `[G, N]`, columns permuted | the scales that go with [`MarlinLayout`] |
//! | [`ZeroLayout`] | `[G, N/8]`, columns permuted | the zero points that go with [`MarlinLayout`] |

mod marlin;
mod plain;
mod scales;
mod zeros;

pub use marlin::MarlinLayout;
pub use plain::PlainLayout;
pub use scales::ScaleLayout;
pub use zeros::ZeroLayout;

/// A packed word whose eight nibbles are 8: the value that stands for 0 in a symmetric weight, and for padding in every weight.
pub(crate) const PADDING_WORD: u32 = 0x8888_8888;

/// Where one 4-bit value lies in a slice of packed words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WordIndex {
    /// Index of the word.
    pub word: usize,
    /// Nibble of the word, 0..=7: bits `4 * nibble` to `4 * nibble + 3`, low first.
    pub nibble: usize,
}

impl WordIndex {
    /// The value at this place, 0..=15.
    ///
    /// # Panics
    /// Where `words` is shorter than the layout that made this index says.
    pub fn read(self, words: &[u32]) -> u8 {
        ((words[self.word] >> (4 * self.nibble)) & 0xf) as u8
    }

    /// Puts the low four bits of `q` in this place.
    ///
    /// # Panics
    /// Where `words` is shorter than the layout that made this index says.
    pub fn write(self, words: &mut [u32], q: u8) {
        let shift = 4 * self.nibble;
        let word = &mut words[self.word];
        *word = (*word & !(0xf << shift)) | (u32::from(q & 0xf) << shift);
    }
}
