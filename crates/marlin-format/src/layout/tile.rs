//! The index function of a tile, tabled: for loops over whole weights.

use super::WordIndex;

/// Rows and columns of a Marlin tile.
pub(crate) const TILE_K: usize = 16;
pub(crate) const TILE_N: usize = 64;

/// Words of a tile of 8-bit values; of 4-bit ones only the first half counts.
const MAX_WORDS: usize = TILE_K * TILE_N / 4;

/// A tile of `V` values to a word, its values exchanged so that each word is one of
/// [`PlainLayout`](super::PlainLayout); [`TileTable`] says which.
///
/// Words of a lane hold rows `2t`, `2t + 1`, `2t + 8` and `2t + 9` (`t = lane % 4`): the values of
/// one plain word are in the same slot of four lanes (4 bits) or two (8 bits), which are a matrix
/// to transpose.
pub(crate) struct Tile<const V: usize>([u32; MAX_WORDS]);

impl<const V: usize> Tile<V> {
    /// Words of a lane.
    const LANE: usize = TILE_K * TILE_N / V / 32;

    /// A tile for [`load`](Self::load) to fill.
    pub(crate) fn new() -> Self {
        Self([0; MAX_WORDS])
    }

    /// Fills it with tile `index` of `words`.
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

/// A tile's word with the values of two neighbouring rows of a column side by side: nibbles `i` and
/// `i + 4`, or bytes `i` and `i + 2`.
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

/// Of every two runs of `run` words, swaps the bits `mask << shift` of the first with the bits
/// `mask` of the second: a step of a transposition.
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

/// The words of each column of a [`Tile`] of 16 x 64.
pub(crate) struct TileTable<const V: usize> {
    /// `[16 / V, 64]`: for each word in [`PlainLayout`](super::PlainLayout) that of the tile.
    places: Vec<u8>,
}

impl<const V: usize> TileTable<V> {
    /// From the index function of a layout. What is in slot 0 or 1 (8 bits), 0 to 3 (4 bits) of a
    /// word is for the lane of that number.
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

    /// Row `row` of the tile's words in [`PlainLayout`](super::PlainLayout): its rows `V * row..`
    /// in all 64 columns.
    pub(crate) fn words(&self, tile: &Tile<V>, row: usize) -> impl Iterator<Item = u32> {
        self.places[row * TILE_N..][..TILE_N]
            .iter()
            .map(|&place| tile.0[usize::from(place)])
    }
}
