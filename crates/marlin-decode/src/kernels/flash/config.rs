//! What both kernels are compiled and launched with.

use super::tiles::TILE_WORDS;
use crate::kernels::Row;
use cubecl::prelude::*;

/// The compile-time parameters of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlashConfig {
    /// Features of a head, a multiple of 16.
    pub head_dim: usize,
    /// True for bf16; otherwise f16.
    pub bf16: bool,
}

impl FlashConfig {
    /// Bytes of a head.
    pub(super) const fn head_bytes(&self) -> usize {
        2 * self.head_dim
    }

    /// Steps of 16 features.
    pub(super) const fn steps(&self) -> usize {
        self.head_dim / 16
    }

    /// The factor of scores before their exponential to the base 2: log2(e) / sqrt(head_dim).
    pub(super) fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.head_dim as f32).sqrt()
    }
}

/// Lengths of a problem as the kernels see them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct FlashLengths {
    pub heads: u32,
    pub kv_heads: u32,
    /// Query heads of a key head.
    pub group: u32,
    pub slots: u32,
    pub max_len: u32,
    /// Positions of the sliding window; `u32::MAX` without one.
    pub window: u32,
}

/// The rows of a tile.
#[derive(CubeType)]
pub(super) struct TileRows {
    /// The first row.
    pub first: u32,
    /// Their number; 0 if there is nothing to do.
    pub count: u32,
    /// The position of the first.
    pub position: u32,
    /// The slot of all.
    pub slot: u32,
}

#[cube]
impl TileRows {
    /// Reads tile number `tile`. A tile whose positions or slot are outside the cache has no rows.
    pub fn read(tiles: &[i32], state: &[i32], tile: u32, lengths: &FlashLengths) -> TileRows {
        let word = tile * comptime!(TILE_WORDS as u32);
        let first = u32::cast_from(tiles[word as usize]);
        let mut count = u32::cast_from(tiles[word as usize + 1]);
        let words = first * comptime!(Row::WORDS as u32);
        let position = state[(words + comptime!(Row::POSITION as u32)) as usize];
        let slot = u32::cast_from(state[(words + comptime!(Row::SLOT as u32)) as usize]);
        if position < 0
            || u32::cast_from(position) + count > lengths.max_len
            || slot >= lengths.slots
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

    /// The first position that any row attends to, from a multiple of `keys` on.
    pub fn first_key(&self, lengths: &FlashLengths, #[comptime] keys: u32) -> u32 {
        (self.position - min(self.position, lengths.window - 1)) / keys * keys
    }

    /// The position after the last.
    pub fn end(&self) -> u32 {
        self.position + self.count
    }
}
