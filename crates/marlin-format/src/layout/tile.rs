//! The index function of a tile, tabled: for loops over whole weights.

use super::WordIndex;

/// Rows and columns of a Marlin tile.
pub(crate) const TILE_K: usize = 16;
pub(crate) const TILE_N: usize = 64;

/// Bytes of a tile of 8-bit values; of 4-bit ones only the first half counts.
const TILE_BYTES: usize = TILE_K * TILE_N;

/// The words of one tile of `V` values to a word, loaded so that each byte belongs in one byte of
/// [`PlainLayout`](super::PlainLayout): one 8-bit value, or the 4-bit values of two neighbouring rows of one column.
pub(crate) struct Tile([u8; TILE_BYTES]);

impl Tile {
    /// Tile `index` of `words`.
    pub(crate) fn load<const V: usize>(words: &[[u8; 4]], index: usize) -> Self {
        let mut tile = [0; TILE_BYTES];
        let words = &words[index * (TILE_BYTES / V)..][..TILE_BYTES / V];
        for (to, &from) in tile.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *to = if V == 8 { paired_nibbles(u32::from_le_bytes(from)).to_le_bytes() } else { from };
        }
        Self(tile)
    }
}

/// Nibbles `i` and `i + 4` of a word in its byte `i`: in a tile two neighbouring rows of one column, as tensor cores take them.
fn paired_nibbles(word: u32) -> u32 {
    let spread = |nibbles: u32| {
        let bytes = (nibbles | (nibbles << 8)) & 0x00ff_00ff;
        (bytes | (bytes << 4)) & 0x0f0f_0f0f
    };
    spread(word & 0xffff) | (spread(word >> 16) << 4)
}

/// Where the values of a tile of 16 x 64 lie in the tile's words, `V` to a word.
pub(crate) struct TileTable<const V: usize> {
    /// `[16 / V, 64]`: for each byte of a word in [`PlainLayout`](super::PlainLayout), which byte of the tile it is.
    places: Vec<[u16; 4]>,
}

impl<const V: usize> TileTable<V> {
    /// From the index function of a layout. In its words of 4-bit values, rows `2i` and `2i + 1` lie four nibbles apart.
    pub(crate) fn new(index: impl Fn(usize, usize) -> WordIndex) -> Self {
        let place = |row, column| {
            let index = index(row, column);
            (4 * index.word + index.slot) as u16
        };
        let places = (0..TILE_K / V).flat_map(|row| (0..TILE_N).map(move |column| (row, column)));
        Self { places: places.map(|(row, column)| std::array::from_fn(|byte| place(V * row + V / 4 * byte, column))).collect() }
    }

    /// Row `row` of the tile's words in [`PlainLayout`](super::PlainLayout): its rows `V * row..` in all 64 columns.
    pub(crate) fn words<'a>(&'a self, tile: &'a Tile, row: usize) -> impl Iterator<Item = u32> + 'a {
        let byte = |place: u16| tile.0[usize::from(place) % TILE_BYTES];
        self.places[row * TILE_N..][..TILE_N].iter().map(move |places| u32::from_le_bytes(places.map(byte)))
    }
}
