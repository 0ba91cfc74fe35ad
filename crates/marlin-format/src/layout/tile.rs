//! The index function of a tile as a lookup table, for loops over whole weights.

use super::WordIndex;

/// The number of rows and columns of a Marlin tile of 4-bit values.
pub(crate) const TILE_K: usize = 16;
pub(crate) const TILE_N: usize = 64;

/// The number of words of 16 x 64 8-bit values. 4-bit values use only the first half.
const MAX_WORDS: usize = TILE_K * TILE_N / 4;

/// A tile with `V` values per word, exchanged so that each word is a word of
/// [`PlainLayout`](super::PlainLayout). [`TileTable`] maps plain words to tile words.
///
/// Words of a lane hold rows `2t`, `2t + 1`, `2t + 8` and `2t + 9` (`t = lane % 4`). The values of
/// one plain word are in the same slot of four lanes (4 bits) or two lanes (8 bits). The values of
/// these lanes form a matrix, which the exchange transposes.
pub(crate) struct Tile<const V: usize>([u32; MAX_WORDS]);

impl<const V: usize> Tile<V> {
    /// The number of words of a lane.
    const LANE: usize = TILE_K * TILE_N / V / 32;

    /// Creates an empty tile for [`load`](Self::load).
    pub(crate) fn new() -> Self {
        Self([0; MAX_WORDS])
    }

    /// Loads tile `index` of `words`, and exchanges its values.
    pub(crate) fn load(&mut self, words: &[[u8; 4]], index: usize) {
        let tile = &mut self.0[..32 * Self::LANE];
        tile.iter_mut()
            .zip(&words[index * 32 * Self::LANE..])
            .for_each(|(to, &from)| *to = in_pairs::<V>(u32::from_le_bytes(from)));
        if V == 8 {
            exchange(tile, 2 * Self::LANE, 16, 0x0000_ffff);
            exchange(tile, Self::LANE, 8, 0x00ff_00ff);
        } else {
            exchange(tile, Self::LANE, 16, 0x0000_ffff);
        }
    }
}

/// Returns a tile's word with the values of two neighbouring rows of a column side by side. The
/// values come from nibbles `i` and `i + 4`, or bytes `i` and `i + 2`.
fn in_pairs<const V: usize>(word: u32) -> u32 {
    if V == 4 {
        return (word & 0xff00_00ff) | ((word & 0xff00) << 8) | ((word >> 8) & 0xff00);
    }
    let spread = |nibbles: u32| {
        let bytes = (nibbles | (nibbles << 8)) & 0x00ff_00ff;
        (bytes | (bytes << 4)) & 0x0f0f_0f0f
    };
    spread(word & 0xffff) | (spread(word >> 16) << 4)
}

/// Swaps the bits `mask << shift` of the first with the bits `mask` of the second run, in every two
/// runs of `run` words. This is one step of a transposition.
#[inline]
pub(crate) fn exchange(words: &mut [u32], run: usize, shift: u32, mask: u32) {
    for runs in words.chunks_exact_mut(2 * run) {
        let (first, second) = runs.split_at_mut(run);
        for (first, second) in first.iter_mut().zip(second) {
            let (low, high) = (*first, *second);
            *first = (low & mask) | ((high & mask) << shift);
            *second = ((low >> shift) & mask) | (high & !mask);
        }
    }
}

/// A table of the words of each column of a [`Tile`] of 16 x 64.
pub(crate) struct TileTable<const V: usize> {
    /// The index of a tile word for each word in [`PlainLayout`](super::PlainLayout),
    /// `[16 / V, 64]`.
    places: Vec<u8>,
}

impl<const V: usize> TileTable<V> {
    /// Creates the table from the index function of a layout. The exchange moves the values in slot
    /// `s` of a lane's word to the lane `s` places later. `s` is 0 or 1 (8 bits), or 0 to 3 (4
    /// bits).
    pub(crate) fn new(index: impl Fn(usize, usize) -> WordIndex) -> Self {
        let place = |row: usize, column| {
            let index = index(V * row, column);
            (index.word + Tile::<V>::LANE * index.slot) as u8
        };
        Self {
            places: (0..TILE_K / V)
                .flat_map(|row| (0..TILE_N).map(move |column| (row, column)))
                .map(|(row, column)| place(row, column))
                .collect(),
        }
    }

    /// Returns row `row` of the words of a tile in [`PlainLayout`](super::PlainLayout): the rows of
    /// the tile from `V * row` on, in all 64 columns.
    pub(crate) fn words(&self, tile: &Tile<V>, row: usize) -> impl Iterator<Item = u32> {
        self.places[row * TILE_N..][..TILE_N]
            .iter()
            .map(|&place| tile.0[usize::from(place)])
    }
}
