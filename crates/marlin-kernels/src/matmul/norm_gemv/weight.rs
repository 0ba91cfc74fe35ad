//! A warp's words, scales and zero points, from memory to fragments.

use super::config::{Config, HALF_TILES, Lengths};
use crate::ptx::{U4, global_address, lane, ld_global_once_4, ld_global_once_16};
use crate::tile::config::METADATA_ROWS;
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
    pub tiles: Array<U4>,
    scales: Array<U4>,
    zeros: Array<u32>,
    /// The start of the first and of the second four tiles of the step to load.
    first: u64,
    second: u64,
    /// The step to load. Of a 2:4 weight addresses are computed where they are loaded from: kept, they would take registers that are not there.
    step: u32,
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
            step: 0u32.runtime(),
        }
    }

    /// Sets the step to load. If K ends in its middle, the first half is loaded twice: the second time it is multiplied by zeros.
    pub fn aim(&mut self, words: &Words, step: u32, lengths: &Lengths, #[comptime] config: Config) {
        self.step = step;
        if comptime!(!config.is_sparse()) {
            let tile = step * comptime!(config.tiles() as u32);
            self.first = words.words + u64::cast_from(words.place) + words.row * u64::cast_from(tile);
            let half =
                if tile + comptime!(HALF_TILES as u32) < lengths.tiles_k { comptime!(HALF_TILES as u32).runtime() } else { 0u32.runtime() };
            self.second = self.first + words.row * u64::cast_from(half);
        }
    }

    /// Issues the load of tile `i` of the step: the words' first, then the metadata's.
    pub fn load_tile(&mut self, words: &Words, #[comptime] i: usize, #[comptime] config: Config) {
        if comptime!(config.is_sparse()) {
            let (start, rows) = if comptime!(i < HALF_TILES) {
                (words.words, comptime!(HALF_TILES as u32).runtime())
            } else {
                (words.metadata, comptime!(METADATA_ROWS as u32).runtime())
            };
            let row = self.step * rows + comptime!((i % HALF_TILES) as u32);
            self.tiles[i] = ld_global_once_16(start + u64::cast_from(words.place) + words.row * u64::cast_from(row));
        } else {
            let half = if comptime!(i < HALF_TILES) { self.first } else { self.second };
            self.tiles[i] = ld_global_once_16(half + words.row * comptime!((i % HALF_TILES) as u64));
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

    /// Returns the scales and zero points that dequantise the words of group `i`.
    pub fn group(&self, #[comptime] i: usize, #[comptime] config: Config) -> Group {
        Group { scales: self.scales[i], zeros: if comptime!(config.zero_points) { self.zeros[i] } else { 0u32.runtime() } }
    }
}
