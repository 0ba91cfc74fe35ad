//! Loads a warp's weight, scales and zero points from memory into registers.

use super::config::{GemvConfig, GemvSizes};
use crate::ptx::{U4, global_address, lane, ld_global_once_4, ld_global_once_8, ld_global_once_16};
use crate::tile::fragment::Group;
use crate::tile::shape::{METADATA_ROWS, TILE_BYTES};
use cubecl::prelude::*;
use marlin_format::{GroupSize, WeightValue};

/// The addresses of a weight's tensors, and the position of a lane's part of 64 columns as 32-bit
/// offsets. The addresses are the same for all threads and so take none of their registers.
#[derive(CubeType, Clone, Copy)]
pub(super) struct WeightAddresses {
    qweight: u64,
    metadata: u64,
    scales: u64,
    zeros: u64,
    /// Bytes of a row of tiles.
    row: u64,
    /// Byte offset of the lane's words in the first row of tiles.
    place: u32,
    /// The number of runs of eight stored scales before the lane's run. The four lanes with the
    /// same `lane / 4` hold the scales and zero points of the eight columns that are `lane / 4`
    /// modulo 8.
    eights: u32,
}

#[cube]
impl WeightAddresses {
    pub fn new<F: Float>(
        qweight: &[u32],
        metadata: ComptimeOption<&[u32]>,
        scales: &[F],
        zero_points: ComptimeOption<&[u32]>,
        tile_n: u32,
        sizes: &GemvSizes,
    ) -> Self {
        WeightAddresses {
            qweight: global_address::<u32>(qweight),
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
            row: u64::cast_from(sizes.tiles_n * comptime!(TILE_BYTES as u32)),
            place: tile_n * comptime!(TILE_BYTES as u32) + lane() * 16,
            eights: tile_n * 8 + lane() / 4,
        }
    }

    /// Returns the addresses of the matrix of an expert, of those of all experts one below the
    /// other.
    pub fn of_expert<F: Float>(
        qweight: &[u32],
        scales: &[F],
        zero_points: ComptimeOption<&[u32]>,
        tile_n: u32,
        expert: u32,
        sizes: &GemvSizes,
        #[comptime] config: GemvConfig,
    ) -> Self {
        let mut of_first = WeightAddresses::new::<F>(
            qweight,
            ComptimeOption::new_None(),
            scales,
            zero_points,
            tile_n,
            sizes,
        );
        let eights = u64::cast_from(expert * sizes.groups) * u64::cast_from(sizes.tiles_n * 8);
        of_first.qweight += u64::cast_from(expert * sizes.tiles_k) * of_first.row;
        of_first.scales += eights * 16;
        of_first.zeros += eights * comptime!(config.value.bits() as u64);
        of_first
    }
}

/// A lane's words of a step, followed by its metadata if the weight is 2:4, with the scales and
/// zero points that dequantise them.
#[derive(CubeType)]
pub(super) struct WeightLoads {
    tiles: Array<U4>,
    scales: Array<U4>,
    zeros: Array<u32>,
    /// The last four of the eight zero points; used with 8 bits only.
    more_zeros: Array<u32>,
    /// Addresses of the words of the first and second chunk of the step to load.
    first: u64,
    second: u64,
    /// The first and second chunk to load of a 2:4 weight. Its addresses are computed at each load,
    /// because there are too few registers to keep them.
    chunk: u32,
    second_chunk: u32,
}

#[cube]
impl WeightLoads {
    pub fn new(#[comptime] config: GemvConfig) -> Self {
        let groups = comptime!(config.lane_groups());
        let nowhere = 0u64.runtime();
        WeightLoads {
            tiles: Array::new(config.loads()),
            scales: Array::new(groups),
            zeros: Array::new(groups),
            more_zeros: Array::new(groups),
            first: nowhere,
            second: nowhere,
            chunk: 0u32.runtime(),
            second_chunk: 0u32.runtime(),
        }
    }

    /// Sets the step to load. If K ends in the middle of the step, the first half of the step is
    /// loaded twice, and the second copy is multiplied by zeros.
    pub fn set_step(
        &mut self,
        weight: &WeightAddresses,
        step: u32,
        sizes: &GemvSizes,
        #[comptime] config: GemvConfig,
    ) {
        if comptime!(config.is_sparse()) {
            self.chunk = step * comptime!(config.chunks() as u32);
            let is_whole = (self.chunk + 1) * comptime!(config.word_rows() as u32) < sizes.tiles_k;
            self.second_chunk = if is_whole { self.chunk + 1 } else { self.chunk };
        } else {
            let tile = step * comptime!(config.tiles() as u32);
            self.first =
                weight.qweight + u64::cast_from(weight.place) + weight.row * u64::cast_from(tile);
            let rows = comptime!(config.word_rows() as u32);
            let is_whole = tile + rows < sizes.tiles_k;
            let half = if is_whole {
                rows.runtime()
            } else {
                0u32.runtime()
            };
            self.second = self.first + weight.row * u64::cast_from(half);
        }
    }

    /// Issues all loads of a step.
    pub fn load_step(
        &mut self,
        weight: &WeightAddresses,
        step: u32,
        sizes: &GemvSizes,
        #[comptime] config: GemvConfig,
    ) {
        self.set_step(weight, step, sizes, config);
        #[unroll]
        for tile in 0..config.loads() {
            self.load_tile(weight, tile, config);
        }
        #[unroll]
        for group in 0..config.lane_groups() {
            self.load_group(weight, step, group, sizes, config);
        }
    }

    /// Issues the load of tile `i` of the step; the tiles of words come first, then those of
    /// metadata.
    pub fn load_tile(
        &mut self,
        weight: &WeightAddresses,
        #[comptime] i: usize,
        #[comptime] config: GemvConfig,
    ) {
        if comptime!(config.is_sparse()) {
            let is_words = comptime!(i < config.tiles());
            let start = if is_words {
                weight.qweight
            } else {
                weight.metadata
            };
            let (rows, tile) = comptime!(if is_words {
                (config.word_rows(), i)
            } else {
                (METADATA_ROWS, i - config.tiles())
            });
            let chunk = if comptime!(tile < rows) {
                self.chunk
            } else {
                self.second_chunk
            };
            let row = chunk * comptime!(rows as u32) + comptime!((tile % rows) as u32);
            self.tiles[i] = ld_global_once_16(
                start + u64::cast_from(weight.place) + weight.row * u64::cast_from(row),
            );
        } else {
            let rows = comptime!(config.word_rows());
            let half = if comptime!(i < rows) {
                self.first
            } else {
                self.second
            };
            self.tiles[i] = ld_global_once_16(half + weight.row * comptime!((i % rows) as u64));
        }
    }

    /// Issues the loads of the words of 16 stored rows, the `i`-th such run of the step.
    pub fn load_k16(
        &mut self,
        weight: &WeightAddresses,
        #[comptime] i: usize,
        #[comptime] config: GemvConfig,
    ) {
        let tiles = comptime!(config.products().tiles_in_step());
        #[unroll]
        for tile in 0..tiles {
            self.load_tile(weight, comptime!(i * tiles + tile), config);
        }
    }

    /// Issues the load of the scales and zero points of group `i` of a step; of groups of 16, those
    /// of a lane's group `i`. Beyond K, the last group is loaded again.
    pub fn load_group(
        &mut self,
        weight: &WeightAddresses,
        step: u32,
        #[comptime] i: usize,
        sizes: &GemvSizes,
        #[comptime] config: GemvConfig,
    ) {
        let first = if comptime!(config.group == GroupSize::G16) {
            step * comptime!(config.groups_in_step() as u32) + lane() % 4 * 2
        } else if comptime!(config.steps_in_group() > 1) {
            step / comptime!(config.steps_in_group() as u32)
        } else {
            step * comptime!(config.groups_in_step() as u32)
        };
        let group = min(first + comptime!(i as u32), sizes.groups - 1) * sizes.tiles_n;
        self.scales[i] =
            ld_global_once_16(weight.scales + u64::cast_from((8 * group + weight.eights) * 16));
        if comptime!(config.zero_points && config.value == WeightValue::Int4) {
            self.zeros[i] =
                ld_global_once_4(weight.zeros + u64::cast_from((8 * group + weight.eights) * 4));
        } else if comptime!(config.zero_points) {
            let both =
                ld_global_once_8(weight.zeros + u64::cast_from((8 * group + weight.eights) * 8));
            self.zeros[i] = both.extract(0usize);
            self.more_zeros[i] = both.extract(1usize);
        }
    }

    /// Returns a lane's word `j` of tile `i`.
    pub fn word(&self, #[comptime] i: usize, #[comptime] j: usize) -> u32 {
        self.tiles[i].extract(j)
    }

    /// Returns a lane's words of sub-tile `j` in the `i`-th run of 16 stored rows, in the form that
    /// [`dequantize`](crate::tile::fragment::dequantize) takes.
    pub fn sub_tile(
        &self,
        #[comptime] i: usize,
        #[comptime] j: usize,
        #[comptime] config: GemvConfig,
    ) -> (u32, u32) {
        let tiles = comptime!(config.products().tiles_in_step());
        (
            self.word(comptime!(i * tiles), j),
            self.word(comptime!(i * tiles + tiles - 1), j),
        )
    }

    /// Returns the scales and zero points that dequantise the words of group `i`.
    pub fn group(&self, #[comptime] i: usize, #[comptime] config: GemvConfig) -> Group {
        let zeros = if comptime!(config.zero_points) {
            self.zeros[i]
        } else {
            0u32.runtime()
        };
        let more_zeros = if comptime!(config.zero_points && config.value == WeightValue::Int8) {
            self.more_zeros[i]
        } else {
            0u32.runtime()
        };
        Group {
            scales: self.scales[i],
            zeros,
            more_zeros,
        }
    }
}
