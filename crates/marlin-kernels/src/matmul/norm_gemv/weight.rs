//! A warp's words, scales and zero points, from memory to fragments.

use super::config::{Config, Lengths};
use crate::ptx::{U4, global_address, lane, ld_global_once_4, ld_global_once_16};
use crate::tile::config::{METADATA_ROWS, TILE_ROWS};
use crate::tile::fragment::Group;
use cubecl::prelude::*;

/// The position of a weight, and in it of a lane's part of 64 columns: as 32-bit offsets, so that the addresses, which all threads share, take none
/// of their registers.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Words {
    words: u64,
    metadata: u64,
    scales: u64,
    zeros: u64,
    /// Bytes of a row of tiles.
    row: u64,
    /// Bytes before the lane's words of the first row.
    place: u32,
    /// Runs of eight columns before the lane's: the lanes of a column in eight have its eight scales and its eight zero points.
    eights: u32,
}

#[cube]
impl Words {
    pub fn new<F: Float>(
        words: &[u32],
        metadata: ComptimeOption<&[u32]>,
        scales: &[F],
        zero_points: ComptimeOption<&[u32]>,
        tile_n: u32,
        lengths: &Lengths,
    ) -> Self {
        Words {
            words: global_address::<u32>(words),
            metadata: #[comptime]
            match metadata {
                ComptimeOption::Some(metadata) => global_address::<u32>(metadata),
                ComptimeOption::None => 0u64.runtime(),
            },
            scales: global_address::<F>(scales),
            zeros: #[comptime]
            match zero_points {
                ComptimeOption::Some(points) => global_address::<u32>(points),
                ComptimeOption::None => 0u64.runtime(),
            },
            row: u64::cast_from(lengths.tiles_n * 512),
            place: tile_n * 512 + lane() * 16,
            eights: tile_n * 8 + lane() / 4,
        }
    }
}

/// A lane's words of a step, after them its metadata where the weight is 2:4, with the scales and zero points to dequantise them.
#[derive(CubeType)]
pub(super) struct WeightLoads {
    tiles: Array<U4>,
    scales: Array<U4>,
    zeros: Array<u32>,
    /// The words of the first and of the second chunk of the step to load.
    first: u64,
    second: u64,
    /// The chunks to load. Of a 2:4 weight addresses are computed where they are loaded from: kept, they would take registers that are not there.
    chunk: u32,
    second_chunk: u32,
}

#[cube]
impl WeightLoads {
    pub fn new(#[comptime] config: Config) -> Self {
        let groups = comptime!(config.groups_in_step());
        let nowhere = 0u64.runtime();
        WeightLoads {
            tiles: Array::new(config.loads()),
            scales: Array::new(groups),
            zeros: Array::new(groups),
            first: nowhere,
            second: nowhere,
            chunk: 0u32.runtime(),
            second_chunk: 0u32.runtime(),
        }
    }

    /// Sets the step to load. If K ends in its middle, the first half is loaded twice: the second time it is multiplied by zeros.
    pub fn aim(&mut self, words: &Words, step: u32, lengths: &Lengths, #[comptime] config: Config) {
        if comptime!(config.is_sparse()) {
            self.chunk = step * comptime!(config.chunks() as u32);
            let is_whole = (self.chunk + 1) * comptime!(TILE_ROWS as u32) < lengths.tiles_k;
            self.second_chunk = if is_whole { self.chunk + 1 } else { self.chunk };
        } else {
            let tile = step * comptime!(config.tiles() as u32);
            self.first = words.words + u64::cast_from(words.place) + words.row * u64::cast_from(tile);
            let is_whole = tile + comptime!(TILE_ROWS as u32) < lengths.tiles_k;
            let half = if is_whole { comptime!(TILE_ROWS as u32).runtime() } else { 0u32.runtime() };
            self.second = self.first + words.row * u64::cast_from(half);
        }
    }

    /// Issues the load of tile `i` of the step: the words' first, then the metadata's.
    pub fn load_tile(&mut self, words: &Words, #[comptime] i: usize, #[comptime] config: Config) {
        if comptime!(config.is_sparse()) {
            let is_words = comptime!(i < config.tiles());
            let start = if is_words { words.words } else { words.metadata };
            let (rows, tile) = comptime!(if is_words { (TILE_ROWS, i) } else { (METADATA_ROWS, i - config.tiles()) });
            let chunk = if comptime!(tile < rows) { self.chunk } else { self.second_chunk };
            let row = chunk * comptime!(rows as u32) + comptime!((tile % rows) as u32);
            self.tiles[i] = ld_global_once_16(start + u64::cast_from(words.place) + words.row * u64::cast_from(row));
        } else {
            let half = if comptime!(i < TILE_ROWS) { self.first } else { self.second };
            self.tiles[i] = ld_global_once_16(half + words.row * comptime!((i % TILE_ROWS) as u64));
        }
    }

    /// Issues the load of group `i` of a step; past K, of the last one again.
    pub fn load_group(&mut self, words: &Words, step: u32, #[comptime] i: usize, lengths: &Lengths, #[comptime] config: Config) {
        let group = min(step * comptime!(config.groups_in_step() as u32) + comptime!(i as u32), lengths.groups - 1) * lengths.tiles_n;
        self.scales[i] = ld_global_once_16(words.scales + u64::cast_from((8 * group + words.eights) * 16));
        if comptime!(config.zero_points) {
            self.zeros[i] = ld_global_once_4(words.zeros + u64::cast_from((8 * group + words.eights) * 4));
        }
    }

    /// Returns a lane's word `j` of tile `i`.
    pub fn word(&self, #[comptime] i: usize, #[comptime] j: usize) -> u32 {
        self.tiles[i].extract(j)
    }

    /// Returns the scales and zero points that dequantise the words of group `i`.
    pub fn group(&self, #[comptime] i: usize, #[comptime] config: Config) -> Group {
        Group { scales: self.scales[i], zeros: if comptime!(config.zero_points) { self.zeros[i] } else { 0u32.runtime() } }
    }
}
