//! The copies of a stripe: which bytes of the operands are copied into each stage.

use super::pipeline::PipelineState;
use crate::ptx::{
    cp_async_bulk, cp_async_bulk_tensor_2d, elect_sync, mbarrier_arrive_expect_tx,
    mbarrier_wait_parity, opaque,
};
use crate::tile::config::Config;
use crate::tile::fragment::group_of;
use crate::tile::rows::{RowBlock, groups_of_expert};
use crate::tile::shape::{ATOM_K, ATOM_ROW_BYTES, CHUNK_N, CHUNK_STEPS, METADATA_ROWS, TILE_BYTES};
use crate::tile::sizes::TileSizes;
use crate::tile::stripe::{TilePart, tile_place, weight_chunk};
use cubecl::prelude::*;

/// Global addresses of the operands.
#[derive(CubeType, Clone, Copy)]
pub(super) struct ProducerAddresses {
    /// The tensor map of activations.
    pub x_map: u64,
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
}

/// The operands to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Operand {
    Weight,
    Activations,
    Both,
}

/// Fills the stages with the steps of a stripe, one after the other.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Producer {
    /// The first unit of the stripe.
    pub start: u32,
    /// The stage to fill next.
    pub state: PipelineState,
    /// The part of the tile that is not copied yet; it starts with the next step.
    part: TilePart,
    /// Steps that are not copied yet.
    pub remaining_steps: u32,
    /// The tile's first chunk along N.
    chunk_n: u32,
    /// The tile's chunks along N; fewer if the tile extends beyond N.
    chunks: u32,
    /// The tile's first row of activations.
    row: u32,
    /// The expert of the tile's rows; without experts not used.
    expert: u32,
}

#[cube]
impl Producer {
    /// Creates the producer at the start of a stripe of at least one unit.
    pub fn new(
        first: PipelineState,
        start: u32,
        end: u32,
        source: &ProducerAddresses,
        sizes: &TileSizes,
        #[comptime] config: Config,
    ) -> Producer {
        let mut producer = Producer {
            start,
            state: first,
            part: TilePart::last(sizes, start, end),
            remaining_steps: end - start + sizes.waves * sizes.depth,
            chunk_n: 0u32.runtime(),
            chunks: 0u32.runtime(),
            row: 0u32.runtime(),
            expert: 0u32.runtime(),
        };
        producer.enter(source, sizes, config);
        producer
    }

    /// Computes the position of the current tile.
    fn enter(&mut self, source: &ProducerAddresses, sizes: &TileSizes, #[comptime] config: Config) {
        let (column, row_block) = tile_place(self.part.tile, sizes, config);
        self.chunk_n = weight_chunk(column, 0u32.runtime(), sizes, config);
        self.chunks = if comptime!(config.has_partial_gates()) {
            2 * min(
                sizes.chunks_n / 2 - self.chunk_n,
                comptime!(config.tile.chunks_n() as u32 / 2),
            )
        } else {
            min(
                sizes.chunks_n - self.chunk_n,
                comptime!(config.tile.chunks_n() as u32),
            )
        };
        if comptime!(config.rows.has_experts()) {
            let block = RowBlock::new(row_block, source.row_blocks, sizes, true, config);
            self.row = block.first;
            self.expert = block.expert;
        } else {
            self.row = row_block * comptime!(config.tile.rows() as u32);
        }
    }

    /// Advances to the next step.
    pub fn next(
        &mut self,
        source: &ProducerAddresses,
        sizes: &TileSizes,
        #[comptime] config: Config,
    ) {
        self.state.next(config);
        self.remaining_steps = opaque(self.remaining_steps - 1);
        self.part.first += 1;
        if self.part.first == self.part.end {
            self.part.next(sizes, self.start, config);
            self.enter(source, sizes, config);
        }
    }

    /// Starts a warp's share of the copies of the next step, in a block without a producer. The
    /// stage is the second before the stage that the warp multiplies, so it rarely waits for other
    /// warps.
    pub fn share(
        &mut self,
        warp: u32,
        source: &ProducerAddresses,
        sizes: &TileSizes,
        #[comptime] config: Config,
    ) {
        if self.remaining_steps > 0 {
            let warps_n = comptime!(config.tile.warps_n as u32);
            if elect_sync() {
                self.wait_empty();
                if warp == 0 {
                    self.expect_bytes(config);
                }
                if comptime!(config.tile.warps_n == CHUNK_STEPS)
                    || warp % warps_n < comptime!(CHUNK_STEPS as u32)
                {
                    self.start(
                        warp / warps_n,
                        warp % warps_n,
                        source,
                        sizes,
                        Operand::Both,
                        config,
                    );
                }
            }
            self.next(source, sizes, config);
        }
    }

    /// Starts the copies of a step.
    pub fn start_all(
        &self,
        source: &ProducerAddresses,
        sizes: &TileSizes,
        #[comptime] operand: Operand,
        #[comptime] config: Config,
    ) {
        #[unroll]
        for warp_k in 0..comptime!(config.tile.warps_k as u32) {
            #[unroll]
            for part in 0..comptime!(CHUNK_STEPS as u32) {
                self.start(warp_k, part, source, sizes, operand, config);
            }
        }
    }

    /// Waits until the stage is empty.
    pub fn wait_empty(&self) {
        mbarrier_wait_parity(self.state.full + 8, self.state.parity);
    }

    /// Announces the bytes of a step to its barrier; called once for each step, whichever warps
    /// start the copies.
    pub fn expect_bytes(&self, #[comptime] config: Config) {
        let bytes = self.chunks * comptime!((config.tile.warps_k * config.chunk_bytes()) as u32)
            + comptime!(config.activation_bytes() as u32);
        mbarrier_arrive_expect_tx(self.state.full, bytes);
    }

    /// Starts one of the four parts of the copies of a row of chunks. A part is the tiles of one
    /// step of 16 stored rows, and some of the activations, metadata, scales and zero points of the
    /// chunks. Chunks that are side by side along N are contiguous in memory.
    ///
    /// Beyond N nothing is copied: whatever the stage holds there only affects outputs that no
    /// thread writes. Beyond K the last chunk is copied again, because the previous contents of a
    /// stage may be NaN. The activations are zeros beyond K, and beyond M.
    fn start(
        &self,
        warp_k: u32,
        part: u32,
        source: &ProducerAddresses,
        sizes: &TileSizes,
        #[comptime] operand: Operand,
        #[comptime] config: Config,
    ) {
        let chunks_n = comptime!(config.tile.chunks_n() as u32);
        let (stage, full) = (self.state.stage, self.state.full);
        let step = self.part.first;
        let chunk_k = if comptime!(config.pairs_steps()) {
            step / 2 * comptime!(2 * config.tile.warps_k as u32) + 2 * warp_k + step % 2
        } else {
            step * comptime!(config.tile.warps_k as u32) + warp_k
        };
        let chunk = min(chunk_k, sizes.chunks_k - 1);
        if comptime!(operand != Operand::Weight) && part == 0 {
            let atom_bytes = comptime!((config.tile.rows() * ATOM_ROW_BYTES) as u32);
            let atoms = comptime!(config.tile.atoms() as u32);
            #[unroll]
            for atom in 0..atoms {
                let to = comptime!(config.activations_offset() as u32)
                    + (warp_k * atoms + atom) * atom_bytes;
                let column = (chunk_k * atoms + atom) * comptime!(ATOM_K as u32);
                cp_async_bulk_tensor_2d(stage + to, source.x_map, column, self.row, full);
            }
        }
        if comptime!(operand != Operand::Activations) {
            #[unroll]
            for i in 0..comptime!(config.tiles_in_step() as u32) {
                let (rows, row) = (
                    comptime!(config.word_rows() as u32),
                    part * comptime!(config.tiles_in_step() as u32) + i,
                );
                let to = stage + (warp_k * rows + row) * comptime!(chunks_n * TILE_BYTES as u32);
                let row = if comptime!(config.rows.has_experts()) {
                    (self.expert * sizes.chunks_k + chunk) * rows + row
                } else {
                    chunk * rows + row
                };
                self.copy_row(to, source.qweight, row, TILE_BYTES as u32, sizes, config);
            }
            if comptime!(config.tile.is_sparse()) && part >= 2 {
                let row = part - 2;
                let to = comptime!(config.metadata_offset() as u32)
                    + (warp_k * comptime!(METADATA_ROWS as u32) + row)
                        * comptime!(chunks_n * TILE_BYTES as u32);
                let row = chunk * comptime!(METADATA_ROWS as u32) + row;
                self.copy_row(
                    stage + to,
                    source.metadata,
                    row,
                    TILE_BYTES as u32,
                    sizes,
                    config,
                );
            }
            #[unroll]
            for i in 0..comptime!(config.groups_in_chunk() as u32) {
                let at = warp_k * comptime!(config.groups_in_chunk() as u32 * chunks_n)
                    + comptime!(i * chunks_n);
                let group = group_of(chunk, i, config);
                let group = if comptime!(config.rows.has_experts()) {
                    group + self.expert * groups_of_expert(sizes, config)
                } else {
                    group
                };
                if comptime!(config.grouped()) && part == 1 {
                    let bytes = comptime!(CHUNK_N as u32 * 2);
                    let to = comptime!(config.scales_offset() as u32) + at * bytes;
                    self.copy_row(stage + to, source.scales, group, bytes, sizes, config);
                }
                if comptime!(config.zero_points) && part == 2 {
                    let bytes = comptime!(config.group_zeros_bytes() as u32);
                    let to = comptime!(config.zeros_offset() as u32) + at * bytes;
                    self.copy_row(stage + to, source.zeros, group, bytes, sizes, config);
                }
            }
        }
    }

    /// Starts the copy of row `row` of an array at `start` that has `bytes` bytes for each chunk.
    /// All chunks of the tile are one copy; with SwiGLU, the chunks of the gates and those of the
    /// ups are one copy each.
    fn copy_row(
        &self,
        to: u32,
        start: u64,
        row: u32,
        #[comptime] bytes: u32,
        sizes: &TileSizes,
        #[comptime] config: Config,
    ) {
        let first = u64::cast_from(row * sizes.chunks_n + self.chunk_n);
        if comptime!(config.is_gated()) {
            let half = comptime!(config.tile.chunks_n() as u32 / 2 * bytes);
            let copied = if comptime!(config.has_partial_gates()) {
                self.chunks / 2 * bytes
            } else {
                half.runtime()
            };
            let ups = first + u64::cast_from(sizes.chunks_n / 2);
            cp_async_bulk(
                to,
                start + first * comptime!(bytes as u64),
                copied,
                self.state.full,
            );
            cp_async_bulk(
                to + half,
                start + ups * comptime!(bytes as u64),
                copied,
                self.state.full,
            );
        } else {
            cp_async_bulk(
                to,
                start + first * comptime!(bytes as u64),
                self.chunks * bytes,
                self.state.full,
            );
        }
    }
}
