//! A warp's words, scales and zero points, from memory to fragments.

use super::config::{Config, Lengths, TILES};
use crate::ptx::{U4, global_address, lane, ld_global_once_4, ld_global_once_16};
use crate::tile::fragment::Group;
use cubecl::prelude::*;

/// The position of a weight, and in it of a lane's part of 64 columns: as 32-bit offsets, so that the addresses, which all threads share, take none
/// of their registers.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Words {
    words: u64,
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
    pub fn new<F: Float>(words: &[u32], scales: &[F], zero_points: ComptimeOption<&[u32]>, tile_n: u32, lengths: &Lengths) -> Self {
        Words {
            words: global_address::<u32>(words),
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

/// A lane's words of a step, with the scales and zero points to dequantise them.
#[derive(CubeType)]
pub(super) struct WeightLoads {
    pub tiles: Array<U4>,
    scales: Array<U4>,
    zeros: Array<u32>,
    /// The start of the first and of the second four tiles of the step to load.
    first: u64,
    second: u64,
}

#[cube]
impl WeightLoads {
    pub fn new(#[comptime] config: Config) -> Self {
        let groups = comptime!(config.groups_in_step());
        let nowhere = 0u64.runtime();
        WeightLoads { tiles: Array::new(TILES), scales: Array::new(groups), zeros: Array::new(groups), first: nowhere, second: nowhere }
    }

    /// Sets the step to load. If K ends in its middle, the first half is loaded twice: the second time it is multiplied by zeros.
    pub fn aim(&mut self, words: &Words, step: u32, lengths: &Lengths) {
        let tile = step * comptime!(TILES as u32);
        self.first = words.words + u64::cast_from(words.place) + words.row * u64::cast_from(tile);
        let half =
            if tile + comptime!(TILES as u32 / 2) < lengths.tiles_k { comptime!(TILES as u32 / 2).runtime() } else { 0u32.runtime() };
        self.second = self.first + words.row * u64::cast_from(half);
    }

    /// Issues the load of tile `i` of the step.
    pub fn load_tile(&mut self, words: &Words, #[comptime] i: usize) {
        let half = if comptime!(i < TILES / 2) { self.first } else { self.second };
        self.tiles[i] = ld_global_once_16(half + words.row * comptime!((i % (TILES / 2)) as u64));
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
