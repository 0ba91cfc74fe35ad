//! The copy pipeline of warpgroups: one warp copies, all others multiply.
//!
//! ```text
//! producer    wait empty[s] -> expect bytes, start copies            -> s + 1, ...
//!                  ^                        | the copies themselves
//!                  | one arrival a warp     v  complete full[s]
//! consumers   release s - 1  <- first products of s  <- wait full[s]  <- s, s + 1, ...
//! ```
//!
//! The producer is one thread of a warp of its own. It starts bulk copies, which the copy engine carries out and counts in bytes on the
//! stage's barrier `full`; it waits for nothing but a stage to be `empty`, and runs on across tiles while the consumers write theirs.
//! Consumers copy nothing, compute no address of global memory, and meet each other only where a tile ends.
//!
//! `wgmma` reads a stage's activations after it was issued, so a warp releases a stage once the first products of the next are issued and all
//! before them are done.
//!
//! Each barrier completes one phase a pass over the stages. Waiting for the phase of parity p ends once it is complete, so consumers start
//! with 0, and the producer with 1: the phase before a barrier's first counts as complete, and the stages as empty.

use super::config::{ACTIVATION_ROW_BYTES, BARRIER_BYTES, CHUNK_K, CHUNK_N, Config, TILE_ROW_BYTES, TILE_ROWS};
use super::copy::{Source, group_of};
use super::kernel::Lengths;
use super::stripe::Place;
use crate::ptx::{
    barrier_arrive, barrier_arrive_expect, barrier_init, barrier_wait, barrier_wait_warp, copy_bulk, copy_tensor, elect, fence_proxy_async, lane, prefetch_map,
    sync_arrive, sync_some, sync_warp,
};
use cubecl::prelude::*;

/// Number of the named barrier of a block's warps, among which 0 is that of `sync_cube`.
const CONSUMERS: usize = 1;

/// Whose turn it is: a stage, its barriers, and the parity of the phase that is waited for.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Turn {
    /// The stage.
    pub stage: u32,
    /// Its barrier `full`, which `empty` follows.
    full: u32,
    /// The parity of the pass.
    parity: u32,
    /// The barrier `full` of the stage before, which is not released yet; 0 before the first.
    held: u32,
}

#[cube]
impl Turn {
    /// The first stage of the first pass.
    pub fn first(stages: u32, barriers: u32, parity: u32) -> Turn {
        Turn { stage: stages, full: barriers, parity, held: 0u32.runtime() }
    }

    /// To the next stage, of the next pass after the last.
    pub fn next(&mut self, stages: u32, barriers: u32, #[comptime] config: Config) {
        self.held = self.full;
        if self.stage == stages + comptime!(((config.tile.stages - 1) * config.stage_bytes()) as u32) {
            self.stage = stages;
            self.full = barriers;
            self.parity ^= 1;
        } else {
            self.stage += comptime!(config.stage_bytes() as u32);
            self.full += comptime!(BARRIER_BYTES as u32);
        }
    }

    /// A consumer waits for the stage's copies.
    pub fn wait(&self) {
        barrier_wait_warp(self.full, self.parity);
    }

    /// A warp of consumers is done with the stage before.
    pub fn release_last(&self) {
        if lane() == 0 && self.held != 0 {
            barrier_arrive(self.held + 8);
        }
    }
}

/// A consumer waits until the producer has set up the barriers.
#[cube]
pub(super) fn meet_producer(#[comptime] config: Config) {
    sync_some(CONSUMERS, comptime!(config.block_threads()));
}

/// All warps that multiply meet.
#[cube]
pub(super) fn sync_consumers(#[comptime] config: Config) {
    if comptime!(config.has_producer()) {
        sync_some(CONSUMERS, comptime!(config.tile.threads()));
    } else {
        sync_cube();
    }
}

/// What the producer's warp does: sets up the barriers, then copies the block's stripe, of at least one step.
#[cube]
pub(super) fn produce(
    source: &Source,
    stages: u32,
    barriers: u32,
    start: u32,
    end: u32,
    lengths: &Lengths,
    #[comptime] config: Config,
) {
    let elected = elect();
    if elected {
        prefetch_map(source.x_map);
        #[unroll]
        for stage in 0..comptime!(config.tile.stages as u32) {
            let full = barriers + comptime!(stage * BARRIER_BYTES as u32);
            barrier_init(full, 1usize);
            barrier_init(full + 8, comptime!(config.tile.warps()));
        }
        // For the copy engine, which is to find them set up too.
        fence_proxy_async();
    }
    sync_warp();
    sync_arrive(CONSUMERS, comptime!(config.block_threads()));
    if elected {
        let mut turn = Turn::first(stages, barriers, 1u32.runtime());
        let mut place = Place::last(lengths, start, end);
        let mut to_copy = end - start;
        while to_copy > 0 {
            let (column, row_block) = lengths.by_row_blocks.div_mod(place.tile);
            let copied = Copied::new(column, row_block, lengths, config);
            for step in place.first..place.end {
                barrier_wait(turn.full + 8, turn.parity);
                copied.start(step, &turn, source, lengths, config);
                turn.next(stages, barriers, config);
            }
            to_copy -= place.end - place.first;
            place.step_back(lengths, start);
        }
    }
}

/// What is copied in each step of a tile.
#[derive(CubeType, Clone, Copy)]
struct Copied {
    /// The first chunk along N.
    chunk_n: u32,
    /// Chunks along N: fewer than the tile has where it reaches past N.
    chunks: u32,
    /// The first row of activations.
    row: u32,
    /// Bytes of a step.
    bytes: u32,
}

#[cube]
impl Copied {
    fn new(column: u32, row_block: u32, lengths: &Lengths, #[comptime] config: Config) -> Copied {
        let chunk_n = column * comptime!(config.tile.warps_n as u32);
        let chunks = min(lengths.chunks_n - chunk_n, comptime!(config.tile.warps_n as u32));
        let row = row_block * comptime!(config.tile.rows() as u32);
        let bytes = chunks * comptime!((config.tile.warps_k * config.chunk_bytes()) as u32)
            + comptime!((config.tile.warps_k * config.tile.rows() * ACTIVATION_ROW_BYTES) as u32);
        Copied { chunk_n, chunks, row, bytes }
    }

    /// Starts the copies of a step: of the weight row by row, since chunks that are side by side follow each other in memory.
    ///
    /// Past N nothing is copied: what a stage has there becomes outputs that nobody writes. Past K the last chunk is copied again, since what
    /// a stage has there may be no numbers; the activations are zeros there, and past M.
    fn start(&self, step: u32, turn: &Turn, source: &Source, lengths: &Lengths, #[comptime] config: Config) {
        let warps_n = comptime!(config.tile.warps_n as u32);
        let (stage, full) = (turn.stage, turn.full);
        barrier_arrive_expect(full, self.bytes);
        #[unroll]
        for warp_k in 0..comptime!(config.tile.warps_k as u32) {
            let chunk_k = step * comptime!(config.tile.warps_k as u32) + warp_k;
            let chunk = min(chunk_k, lengths.chunks_k - 1);
            #[unroll]
            for i in 0..comptime!(TILE_ROWS as u32) {
                let to = stage + comptime!((warp_k * TILE_ROWS as u32 + i) * warps_n * TILE_ROW_BYTES as u32);
                let from = (chunk * comptime!(TILE_ROWS as u32) + i) * lengths.chunks_n + self.chunk_n;
                let bytes = self.chunks * comptime!(TILE_ROW_BYTES as u32);
                copy_bulk(to, source.words + u64::cast_from(from) * comptime!(TILE_ROW_BYTES as u64), bytes, full);
            }
            #[unroll]
            for part in 0..comptime!(config.groups_in_chunk() as u32) {
                let from = u64::cast_from(group_of(chunk, part, config) * lengths.chunks_n + self.chunk_n);
                let at = comptime!((warp_k * config.groups_in_chunk() as u32 + part) * warps_n);
                if comptime!(config.grouped()) {
                    let bytes = comptime!(CHUNK_N as u32 * 2);
                    let to = stage + comptime!(config.scales_offset() as u32 + at * bytes);
                    copy_bulk(to, source.scales + from * comptime!(bytes as u64), self.chunks * bytes, full);
                }
                if comptime!(config.zero_points) {
                    let bytes = comptime!(CHUNK_N as u32 / 2);
                    let to = stage + comptime!(config.zeros_offset() as u32 + at * bytes);
                    copy_bulk(to, source.zeros + from * comptime!(bytes as u64), self.chunks * bytes, full);
                }
            }
            let to = stage + comptime!(config.activations_offset() as u32 + warp_k * (config.tile.rows() * ACTIVATION_ROW_BYTES) as u32);
            copy_tensor(to, source.x_map, chunk_k * comptime!(CHUNK_K as u32), self.row, full);
        }
    }
}
