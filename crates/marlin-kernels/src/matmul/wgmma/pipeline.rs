//! The copy pipeline of warpgroups: the copy engine fills stages, warps multiply them.
//!
//! ```text
//! producer    wait empty[s] -> expect bytes, start copies            -> s + 1, ...
//!                  ^                        | the copies themselves
//!                  | one arrival a warp     v  complete full[s]
//! consumers   release s - 1  <- first products of s  <- wait full[s]  <- s, s + 1, ...
//! ```
//!
//! The producer is one thread of a warp of its own. It starts bulk copies, which the copy engine
//! carries out and counts in bytes on the stage's barrier `full`; it waits only for a stage to be
//! `empty`, and continues across tiles while the consumers write theirs. Consumers copy nothing,
//! compute no address of global memory, and synchronise only at the end of a tile.
//!
//! An additional warp would take registers from all others ([`Config::has_producer`]). Some tiles
//! whose sums need those have no producer: before a step each warp starts its share of the copies
//! of a later one, into a stage that it released a step ago, so it rarely waits for the others.
//! With 128 rows of activations the producer is a warp of a third warpgroup, which keeps 24
//! registers a thread and leaves 240 to the other two ([`Config::moves_registers`]).
//!
//! `wgmma` reads a stage's activations asynchronously, so a warp releases a stage once the first
//! products of the next are issued and all before them are done.
//!
//! Each barrier completes one phase a pass over the stages. A wait for the phase of parity p ends
//! once that phase is complete, so consumers start with 0, and the producer with 1: the phase
//! before a barrier's first counts as complete, and so the stages as empty.

use super::producer::{Operand, Producer, Source};
use crate::overlap::wait;
use crate::ptx::{
    bar_arrive, bar_sync, bar_warp_sync, elect_sync, fence_proxy_async, lane, mbarrier_arrive,
    mbarrier_init, mbarrier_wait_parity_warp, opaque, prefetch_tensormap,
};
use crate::tile::config::{BARRIER_BYTES, Config};
use crate::tile::lengths::Lengths;
use crate::tile::outputs::CONSUMERS;
use cubecl::prelude::*;

/// A position in the ring of stages: a stage, its barriers, and the parity of the phase that is
/// waited for.
#[derive(CubeType, Clone, Copy)]
pub(super) struct PipelineState {
    /// The first stage.
    stages: u32,
    /// Its barriers.
    barriers: u32,
    /// The stage.
    pub stage: u32,
    /// Its barrier `full`, which `empty` follows.
    pub full: u32,
    /// The parity of the pass.
    pub parity: u32,
    /// The barrier `full` of the stage before, which is not released yet; 0 before the first.
    held: u32,
}

#[cube]
impl PipelineState {
    /// The first stage of the first pass.
    pub fn first(stages: u32, barriers: u32, parity: u32) -> PipelineState {
        PipelineState {
            stages,
            barriers,
            stage: stages,
            full: barriers,
            parity,
            held: 0u32.runtime(),
        }
    }

    /// To the next stage, of the next pass after the last.
    pub fn next(&mut self, #[comptime] config: Config) {
        self.held = self.full;
        if self.stage
            == self.stages + comptime!(((config.tile.stages - 1) * config.stage_bytes()) as u32)
        {
            self.stage = self.stages;
            self.full = self.barriers;
            self.parity ^= 1;
        } else {
            self.stage += comptime!(config.stage_bytes() as u32);
            self.full += comptime!(BARRIER_BYTES as u32);
        }
    }

    /// Broadcast from lane 0 to the warp: the compiler then keeps it in uniform registers, which
    /// `wgmma` takes it from.
    pub fn agree(&mut self) {
        bar_warp_sync();
        self.stage = plane_broadcast(self.stage, 0u32);
        self.full = plane_broadcast(self.full, 0u32);
        self.parity = plane_broadcast(self.parity, 0u32);
        self.held = plane_broadcast(self.held, 0u32);
    }

    /// A consumer waits for the stage's copies.
    pub fn wait(&self) {
        mbarrier_wait_parity_warp(self.full, self.parity);
    }

    /// A warp of consumers is done with the stage before.
    ///
    /// The barrier of the warp in [`agree`](Self::agree) puts all lanes' reads before this arrival
    /// of one of them. `compute-sanitizer --tool racecheck` does not follow that order through the
    /// arrival: it reports the reads of all lanes but 0 against the next copies. It reports none
    /// where every lane arrives.
    pub fn release_last(&self) {
        if lane() == 0 && self.held != 0 {
            mbarrier_arrive(self.held + 8);
        }
    }
}

/// One thread sets up the barriers.
#[cube]
fn set_up(barriers: u32, #[comptime] config: Config) {
    #[unroll]
    for stage in 0..comptime!(config.tile.stages as u32) {
        let full = barriers + comptime!(stage * BARRIER_BYTES as u32);
        mbarrier_init(full, 1usize);
        mbarrier_init(full + 8, comptime!(config.tile.warps()));
    }
    // Makes the barriers visible to the copy engine, too.
    fence_proxy_async();
}

/// The producer's warp: sets up the barriers, then copies the block's units, which end at `end`.
///
/// NVRTC cannot unroll its loops, whose counters are [`opaque()`]: less code to fetch, and fewer
/// registers, of which a producer has few.
#[cube]
pub(super) fn produce(
    producer: &mut Producer,
    end: u32,
    source: &Source,
    lengths: &Lengths,
    #[comptime] config: Config,
) {
    let elected = elect_sync();
    if elected {
        prefetch_tensormap(source.x_map);
        set_up(producer.state.barriers, config);
    }
    bar_warp_sync();
    bar_arrive(CONSUMERS, comptime!(config.tile.threads() + 32));
    if elected {
        // The weights of the first steps, into all stages; their activations once the kernel before
        // has made them.
        let first = PipelineState::first(
            producer.state.stages,
            producer.state.barriers,
            producer.state.parity,
        );
        let mut ahead = Producer::new(first, producer.start, end, lengths, config);
        let mut filled = 0u32.runtime();
        while ahead.left > 0 && filled < comptime!(config.tile.stages as u32) {
            ahead.expect_bytes(config);
            ahead.start_all(source, lengths, Operand::Weight, config);
            ahead.next(lengths, config);
            filled = opaque(filled + 1);
        }
        wait(true);
        while filled > 0 {
            producer.start_all(source, lengths, Operand::Activations, config);
            producer.next(lengths, config);
            filled = opaque(filled - 1);
        }
        while producer.left > 0 {
            producer.wait_empty();
            producer.expect_bytes(config);
            producer.start_all(source, lengths, Operand::Both, config);
            producer.next(lengths, config);
        }
    }
}

/// A consumer waits until the producer has set up the barriers.
#[cube]
pub(super) fn meet_producer(#[comptime] config: Config) {
    bar_sync(CONSUMERS, comptime!(config.tile.threads() + 32));
}

/// The start of warps without a producer: one sets up the barriers, then all fill all stages but
/// two.
#[cube]
pub(super) fn fill_ahead(
    producer: &mut Producer,
    warp: u32,
    source: &Source,
    lengths: &Lengths,
    #[comptime] config: Config,
) {
    if warp == 0 && elect_sync() {
        prefetch_tensormap(source.x_map);
        set_up(producer.state.barriers, config);
    }
    sync_cube();
    let mut filled = 0u32.runtime();
    while filled != comptime!(config.tile.stages as u32 - 2) {
        producer.share(warp, source, lengths, config);
        filled = opaque(filled + 1);
    }
}
