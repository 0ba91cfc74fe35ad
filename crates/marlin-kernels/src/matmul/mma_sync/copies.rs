//! The copies of one step of a tile with `mma.sync`: which bytes of the operands a thread copies.

use crate::ptx::{
    cp_async_4, cp_async_8, cp_async_16, cp_async_16_or_zero, lane, ld_global_4, prefetch_l2,
};
use crate::tile::config::Config;
use crate::tile::fragment::group_of;
use crate::tile::rows::{RowBlock, RowOrder, groups_of_expert};
use crate::tile::shape::{CHUNK_N, METADATA_ROWS, TILE_BYTES};
use crate::tile::sizes::TileSizes;
use crate::tile::stripe::{tile_place, weight_chunk};
use cubecl::prelude::*;

/// Global addresses of the operands.
#[derive(CubeType, Clone, Copy)]
pub(super) struct CopyAddresses {
    /// Activations.
    pub x: u64,
    /// Packed values.
    pub qweight: u64,
    /// Metadata of a 2:4 weight.
    pub metadata: u64,
    /// Scales.
    pub scales: u64,
    /// Zero points.
    pub zeros: u64,
    /// Blocks of rows; without experts not used.
    pub row_blocks: u64,
    /// The token of each row; used if rows are gathered.
    pub tokens: u64,
}

/// Returns the number of threads of a team.
pub(super) const fn team_threads(config: &Config) -> u32 {
    32 * config.tile.warps_n as u32
}

/// The next copies of a thread: the addresses of its part of one step of a tile.
///
/// A warp copies the chunk that it will multiply: a lane's 16 bytes of a tile are the lane's own
/// words. The activations of a chunk are copied by the threads of a team together, in runs of 16
/// bytes. Runs are swizzled in blocks of eight: run `c` of row `r` is stored at position
/// `c ^ (r % 8)`, so that `ldmatrix` reads eight rows without bank conflicts.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Copies {
    /// Address of the lane's words in the first tile of the chunk.
    qweight: u64,
    /// Address of the lane's words in the first of the chunk's two tiles of metadata.
    metadata: u64,
    /// Bytes from a tile to the one below it.
    words_row: u64,
    /// Address of the lane's run of the scales of the chunk's columns, in group 0.
    scales: u64,
    /// Address of the lane's zero points of the chunk's columns, in group 0.
    zeros: u64,
    /// The warp's chunk along K.
    chunk: u32,
    /// Number of chunks along K; 0 if the warp's columns are beyond N.
    chunks: u32,
    /// Address of the thread's first run of activations.
    x: u64,
    /// Bytes between the thread's runs.
    x_row: u64,
    /// The row of K where the thread's first run starts.
    k: u32,
    /// Number of rows of activations from the thread's first row on. With gathered rows, the token
    /// whose row is row `lane` of the tile, or [`NO_TOKEN`].
    rows: u32,
}

/// Returns the number of runs of activations in a row of a step.
const fn runs(config: &Config) -> u32 {
    (config.tile.depth() * config.tile.activation_bytes() / 16) as u32
}

/// Returns the number of runs of activations in a row of a chunk. A thread of a team copies one of
/// these runs, in every [`row_step`]-th row.
const fn chunk_runs(config: &Config) -> u32 {
    (config.tile.chunk_rows() * config.tile.activation_bytes() / 16) as u32
}

/// Returns the number of rows of activations between a thread's runs.
const fn row_step(config: &Config) -> u32 {
    team_threads(config) / chunk_runs(config)
}

/// Returns the row of activations that a thread copies first, and the run in this row within a
/// step.
#[cube]
fn first_run(#[comptime] config: Config) -> (u32, u32) {
    let (team, thread) = (
        UNIT_POS_X / comptime!(team_threads(&config)),
        UNIT_POS_X % comptime!(team_threads(&config)),
    );
    let runs = comptime!(chunk_runs(&config));
    (thread / runs, team * runs + thread % runs)
}

/// Returns the place of a run of a row of activations in a stage.
#[cube]
fn place_of_run(row: u32, run: u32, #[comptime] config: Config) -> u32 {
    comptime!(config.activations_offset() as u32)
        + (row * comptime!(runs(&config)) + (run ^ (row % 8))) * 16
}

/// The mark in the place of a row's token that the tile does not have the row.
const NO_TOKEN: u32 = u32::MAX;

#[cube]
impl Copies {
    /// Creates the copies without a tile; call [`enter`](Self::enter) next.
    pub fn new(sizes: &TileSizes, #[comptime] config: Config) -> Copies {
        let row_bytes = u64::cast_from(sizes.k) * comptime!(config.tile.activation_bytes() as u64);
        Copies {
            qweight: 0u64.runtime(),
            metadata: 0u64.runtime(),
            words_row: u64::cast_from(sizes.chunks_n) * comptime!(TILE_BYTES as u64),
            scales: 0u64.runtime(),
            zeros: 0u64.runtime(),
            chunk: 0u32.runtime(),
            chunks: 0u32.runtime(),
            x: 0u64.runtime(),
            x_row: row_bytes * comptime!(row_step(&config) as u64),
            k: 0u32.runtime(),
            rows: 0u32.runtime(),
        }
    }

    /// Sets the copies to step `first` of a tile; `is_early` before the wait for the kernel before.
    pub fn enter(
        &mut self,
        tile: u32,
        first: u32,
        source: &CopyAddresses,
        sizes: &TileSizes,
        #[comptime] is_early: bool,
        #[comptime] config: Config,
    ) {
        let lane = lane();
        let warp = UNIT_POS_X / 32;
        let warps_n = comptime!(config.tile.warps_n as u32);
        let (column, number) = tile_place(tile, sizes, config);
        let chunk_n = weight_chunk(column, warp % warps_n, sizes, config);
        self.chunk = first * comptime!(config.tile.warps_k as u32) + warp / warps_n;
        self.chunks = if chunk_n < sizes.chunks_n {
            sizes.chunks_k
        } else {
            0u32.runtime()
        };
        let rows = self.chunk * comptime!(config.word_rows() as u32);
        self.qweight = source.qweight
            + u64::cast_from(rows) * self.words_row
            + u64::cast_from(chunk_n * comptime!(TILE_BYTES as u32) + lane * 16);
        if comptime!(config.tile.is_sparse()) {
            let rows = self.chunk * comptime!(METADATA_ROWS as u32);
            self.metadata = source.metadata
                + u64::cast_from(rows) * self.words_row
                + u64::cast_from(chunk_n * comptime!(TILE_BYTES as u32) + lane * 16);
        }
        self.scales = source.scales + u64::cast_from((chunk_n * 8 + lane % 8) * 16);
        self.zeros = source.zeros
            + u64::cast_from(
                (chunk_n * 8 + lane % 8) * comptime!(config.group_zeros_bytes() as u32 / 8),
            );

        let (row, run) = first_run(config);
        if comptime!(config.rows.has_experts()) {
            let block = RowBlock::new(number, source.row_blocks, sizes, is_early, config);
            self.enter_matrix(block.expert, sizes, config);
            self.k = first * comptime!(config.tile.depth() as u32) + run * 8;
            self.x = source.x + u64::cast_from(self.k) * 2;
            if comptime!(config.rows == RowOrder::Gathered) {
                let place = block.first + min(lane, block.rows - 1);
                let token = ld_global_4(source.tokens + u64::cast_from(place) * 4);
                self.rows = select(lane < block.rows, token, NO_TOKEN);
            } else {
                self.x += u64::cast_from(block.first + row) * u64::cast_from(sizes.k) * 2;
                self.rows = max(block.rows, row) - row;
            }
        } else {
            let row = number * comptime!(config.tile.rows() as u32) + row;
            let bytes = comptime!(config.tile.activation_bytes() as u32);
            self.k = first * comptime!(config.tile.depth() as u32) + run * comptime!(16 / bytes);
            self.x = source.x
                + u64::cast_from(row) * u64::cast_from(sizes.k) * comptime!(bytes as u64)
                + u64::cast_from(self.k * bytes);
            self.rows = if row < sizes.m {
                sizes.m - row
            } else {
                0u32.runtime()
            };
        }
    }

    /// Moves the addresses of the weight from the first matrix to an expert's.
    fn enter_matrix(&mut self, expert: u32, sizes: &TileSizes, #[comptime] config: Config) {
        let rows = sizes.chunks_k * comptime!(config.word_rows() as u32);
        self.qweight += u64::cast_from(expert) * u64::cast_from(rows) * self.words_row;
        let groups = u64::cast_from(expert * groups_of_expert(sizes, config) * sizes.chunks_n);
        self.scales += groups * comptime!(2 * CHUNK_N as u64);
        self.zeros += groups * comptime!(config.group_zeros_bytes() as u64);
    }

    /// Prefetches the weight of the next steps to the second-level cache. One lane prefetches each
    /// 128 bytes of the words and of the metadata, and each group's scales and zero points.
    pub fn prefetch(&self, steps: u32, sizes: &TileSizes, #[comptime] config: Config) {
        let lane = lane();
        let groups = comptime!(config.groups_in_chunk() as u32);
        let line = self.qweight - u64::cast_from(lane * 16)
            + u64::cast_from(lane / 4) * self.words_row
            + u64::cast_from(lane % 4 * 128);
        let metadata = self.metadata - u64::cast_from(lane * 16)
            + u64::cast_from(lane / 4) * self.words_row
            + u64::cast_from(lane % 4 * 128);
        let mut chunk = self.chunk;
        let mut step = 0u32.runtime();
        while step < steps && chunk < self.chunks {
            let rows = u64::cast_from(step) * self.words_row;
            if lane < comptime!(4 * config.word_rows() as u32) {
                prefetch_l2(
                    line + rows * comptime!((config.word_rows() * config.tile.warps_k) as u64),
                );
            }
            if comptime!(config.tile.is_sparse()) {
                if lane < comptime!(4 * METADATA_ROWS as u32) {
                    prefetch_l2(
                        metadata + rows * comptime!((METADATA_ROWS * config.tile.warps_k) as u64),
                    );
                }
            }
            if lane < comptime!(8 * groups) && lane.is_multiple_of(8) {
                let group = u64::cast_from(group_of(chunk, lane / 8, config) * sizes.chunks_n);
                if comptime!(config.grouped()) {
                    prefetch_l2(self.scales + group * comptime!(2 * CHUNK_N as u64));
                }
                if comptime!(config.zero_points) {
                    prefetch_l2(self.zeros + group * comptime!(config.group_zeros_bytes() as u64));
                }
            }
            chunk += comptime!(config.tile.warps_k as u32);
            step += 1;
        }
    }

    /// Starts the copies of this step into a stage, and advances to the next step.
    pub fn start(&mut self, sizes: &TileSizes, stage: u32, #[comptime] config: Config) {
        if self.chunk < self.chunks {
            self.start_chunk(sizes, stage, config);
        }
        self.chunk += comptime!(config.tile.warps_k as u32);
        self.qweight +=
            self.words_row * comptime!((config.word_rows() * config.tile.warps_k) as u64);
        self.metadata +=
            self.words_row * comptime!((config.tile.metadata_rows() * config.tile.warps_k) as u64);

        // Beyond K nothing is read, and zero activations cancel the padded rows of the weight.
        let bytes = if self.k < sizes.k {
            16u32.runtime()
        } else {
            0u32.runtime()
        };
        let (row, run) = first_run(config);
        #[unroll]
        for i in 0..comptime!((config.tile.rows() as u32).div_ceil(row_step(&config))) {
            if comptime!(config.rows == RowOrder::Gathered) {
                let token = plane_shuffle(self.rows, row + comptime!(i * row_step(&config)));
                if token != NO_TOKEN
                    && row + comptime!(i * row_step(&config)) < comptime!(config.tile.rows() as u32)
                {
                    cp_async_16_or_zero(
                        stage + place_of_run(row + comptime!(i * row_step(&config)), run, config),
                        self.x + u64::cast_from(token) * u64::cast_from(sizes.k) * 2,
                        bytes,
                    );
                }
            } else if comptime!(i * row_step(&config)) < self.rows
                && row + comptime!(i * row_step(&config)) < comptime!(config.tile.rows() as u32)
            {
                let row = row + comptime!(i * row_step(&config));
                cp_async_16_or_zero(
                    stage + place_of_run(row, run, config),
                    self.x + self.x_row * comptime!(i as u64),
                    bytes,
                );
            }
        }
        self.k += comptime!(config.tile.depth() as u32);
        self.x += comptime!((config.tile.activation_bytes() * config.tile.depth()) as u64);
    }

    /// Starts the copies of the warp's chunk.
    fn start_chunk(&self, sizes: &TileSizes, stage: u32, #[comptime] config: Config) {
        let lane = lane();
        let warp = UNIT_POS_X / 32;
        let words = stage + warp * comptime!((config.word_rows() * TILE_BYTES) as u32) + lane * 16;
        #[unroll]
        for i in 0..comptime!(config.word_rows() as u32) {
            cp_async_16(
                words + comptime!(i * TILE_BYTES as u32),
                self.qweight + self.words_row * comptime!(i as u64),
            );
        }
        let metadata = stage
            + comptime!(config.metadata_offset() as u32)
            + warp * comptime!((METADATA_ROWS * TILE_BYTES) as u32)
            + lane * 16;
        #[unroll]
        for i in 0..comptime!(config.tile.metadata_rows() as u32) {
            cp_async_16(
                metadata + comptime!(i * TILE_BYTES as u32),
                self.metadata + self.words_row * comptime!(i as u64),
            );
        }
        // Eight lanes copy the eight 16-byte runs of a group's 64 scales, and the group's eight
        // runs of eight zero points.
        if lane
            < comptime!(if config.grouped() || config.zero_points {
                8 * config.groups_in_chunk() as u32
            } else {
                0
            })
        {
            let group = group_of(self.chunk, lane / 8, config) * sizes.chunks_n;
            if comptime!(config.grouped()) {
                let offset = comptime!(config.scales_offset() as u32)
                    + warp * comptime!(config.scales_bytes() as u32)
                    + lane * 16;
                cp_async_16(
                    stage + offset,
                    self.scales + u64::cast_from(group) * comptime!(2 * CHUNK_N as u64),
                );
            }
            if comptime!(config.zero_points) {
                let run = comptime!(config.group_zeros_bytes() as u32 / 8);
                let to = stage
                    + comptime!(config.zeros_offset() as u32)
                    + warp * comptime!(config.zeros_bytes() as u32)
                    + lane * run;
                let from = self.zeros
                    + u64::cast_from(group) * comptime!(config.group_zeros_bytes() as u64);
                if comptime!(run == 4) {
                    cp_async_4(to, from);
                } else {
                    cp_async_8(to, from);
                }
            }
        }
    }
}
