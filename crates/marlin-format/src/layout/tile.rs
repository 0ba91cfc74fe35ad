//! The index function of a tile, tabled: for loops over whole weights.

use super::WordIndex;

/// Rows and columns of a Marlin tile.
pub(crate) const TILE_K: usize = 16;
pub(crate) const TILE_N: usize = 64;

/// The words of one tile; of 4 bits only the first half.
type Tile = [u32; 256];

/// Where the values of a tile of 16 x 64 lie in the tile's words, `V` to a word.
pub(crate) struct TileTable<const V: usize> {
    /// `[16 / V, 64, V]`: word, and shift in it.
    places: Vec<[(u8, u8); V]>,
}

impl<const V: usize> TileTable<V> {
    /// From the index function of a layout, which gives every word of its first tile below 256.
    pub(crate) fn new(index: impl Fn(usize, usize) -> WordIndex) -> Self {
        let place = |row, column| {
            let index = index(row, column);
            (index.word as u8, index.shift() as u8)
        };
        let places = (0..TILE_K / V).flat_map(|row| (0..TILE_N).map(move |column| (row, column)));
        Self { places: places.map(|(row, column)| std::array::from_fn(|slot| place(V * row + slot, column))).collect() }
    }

    /// Row `row` of the tile's words in [`PlainLayout`](super::PlainLayout): its rows `V * row..` in all 64 columns.
    pub(crate) fn words<'a>(&'a self, tile: &'a Tile, row: usize) -> impl Iterator<Item = u32> + 'a {
        let (bits, max) = (32 / V, u32::MAX >> (32 - 32 / V));
        let gather = move |places: &[(u8, u8); V]| {
            places.iter().rev().fold(0, |word, &(from, shift)| (word << bits) | ((tile[usize::from(from)] >> shift) & max))
        };
        self.places[row * TILE_N..][..TILE_N].iter().map(gather)
    }
}

/// The `N` words of tile `index` in `words`.
pub(crate) fn load_tile<const N: usize>(words: &[[u8; 4]], index: usize) -> Tile {
    let mut tile = [0; 256];
    tile.iter_mut().zip(&words[index * N..][..N]).for_each(|(to, &from)| *to = u32::from_le_bytes(from));
    tile
}
