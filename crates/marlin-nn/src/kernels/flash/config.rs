//! The compile-time parameters and the arguments of both kernels.

use super::tiles::TILE_WORDS;
use crate::cache::CacheLengths;
use crate::kernels::SequenceState;
use cubecl::prelude::*;

/// The compile-time parameters of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlashConfig {
    /// The number of features of a head, a multiple of 16.
    pub head_dim: usize,
    /// True if the dtype is bf16; false if it is f16.
    pub bf16: bool,
    /// The number of positions of a page, if the cache has pages.
    pub page_size: Option<usize>,
}

impl FlashConfig {
    /// Returns the number of bytes of a head.
    pub(super) const fn head_bytes(&self) -> usize {
        2 * self.head_dim
    }

    /// Returns the number of steps of 16 features.
    pub(super) const fn steps(&self) -> usize {
        self.head_dim / 16
    }

    /// Returns the factor of scores before their base-2 exponential: log2(e) / sqrt(head_dim).
    pub(super) fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.head_dim as f32).sqrt()
    }
}

/// The lengths of a problem, as arguments of the kernels.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::kernels) struct FlashLengths {
    pub heads: u32,
    /// The number of query heads of a key head.
    pub group: u32,
    pub cache: CacheLengths,
    /// The number of positions of the sliding window; `u32::MAX` without a window.
    pub window: u32,
}

/// The rows of a tile.
#[derive(CubeType)]
pub(in crate::kernels) struct TileRows {
    /// The index of the first row.
    pub first: u32,
    /// The number of rows; 0 if the tile is empty.
    pub count: u32,
    /// The position of the first row.
    pub position: u32,
    /// The slot of all rows.
    pub slot: u32,
}

#[cube]
impl TileRows {
    /// Reads tile number `tile`. A tile whose positions or slot are outside the cache has no rows.
    pub fn read(tiles: &[i32], state: &[i32], tile: u32, lengths: &FlashLengths) -> TileRows {
        let word = tile * comptime!(TILE_WORDS as u32);
        let first = u32::cast_from(tiles[word as usize]);
        let mut count = u32::cast_from(tiles[word as usize + 1]);
        let words = first * comptime!(SequenceState::WORDS as u32);
        let position = state[(words + comptime!(SequenceState::POSITION as u32)) as usize];
        let slot = u32::cast_from(state[(words + comptime!(SequenceState::SLOT as u32)) as usize]);
        if position < 0
            || u32::cast_from(position) + count > lengths.cache.max_len
            || slot >= lengths.cache.slots
        {
            count = 0u32.runtime();
        }
        TileRows {
            first,
            count,
            position: u32::cast_from(position),
            slot,
        }
    }

    /// Returns the first position that any row attends to, rounded down to a multiple of `keys`.
    pub fn first_key(&self, lengths: &FlashLengths, #[comptime] keys: u32) -> u32 {
        (self.position - min(self.position, lengths.window - 1)) / keys * keys
    }

    /// Returns true if the row before the tile is the token before, of the same slot.
    pub fn follows(&self, state: &[i32]) -> bool {
        let words = (max(self.first, 1u32) - 1) * comptime!(SequenceState::WORDS as u32);
        let position = state[(words + comptime!(SequenceState::POSITION as u32)) as usize];
        let slot = u32::cast_from(state[(words + comptime!(SequenceState::SLOT as u32)) as usize]);
        self.first > 0 && slot == self.slot && position + 1 == i32::cast_from(self.position)
    }

    /// Returns the position after that of the last row.
    pub fn end(&self) -> u32 {
        self.position + self.count
    }
}
