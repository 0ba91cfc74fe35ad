//! The copy pipeline of warpgroups: the copy engine fills stages, and warps multiply them.
//!
//! ```text
//! producer    wait empty[s] -> expect bytes, start copies            -> s + 1, ...
//!                  ^                        | the copies themselves
//!                  | one arrival a warp     v  complete full[s]
//! consumers   release s - 1  <- first products of s  <- wait full[s]  <- s, s + 1, ...
//! ```
//!
//! The producer is one thread of a dedicated warp. It starts bulk copies, which the copy engine
//! performs and whose bytes it counts on the stage's barrier `full`. The producer waits only for
//! stages to become `empty`, and continues with the next tile while the consumers write the outputs
//! of theirs. Consumers copy nothing, compute no addresses of global memory, and synchronise only
//! at the end of a tile.
//!
//! An additional warp takes registers from all other warps ([`Config::has_producer`]). Tiles whose
//! sums need these registers have no producer: before a step, each warp starts its share of the
//! copies of a later step, into a stage that it released one step ago, so it rarely waits for other
//! warps. With 128 rows of activations the producer is a warp of a third warpgroup, which keeps 24
//! registers per thread and leaves 240 to the other two warpgroups ([`Config::moves_registers`]).
//!
//! `wgmma` reads a stage's activations asynchronously, so a warp releases a stage only after the
//! first products of the next stage are issued and all earlier products are done.
//!
//! Each barrier completes one phase in each pass over the stages. A wait for the phase of parity p
//! ends once that phase is complete. Consumers start with parity 0 and the producer with 1: the
//! phase before a barrier's first one counts as complete, which marks the stages as empty.

use super::producer::{Operand, Producer, ProducerAddresses};
use crate::pdl::wait;
use crate::ptx::{
    bar_arrive, bar_sync, bar_warp_sync, elect_sync, fence_proxy_async, lane, mbarrier_arrive,
    mbarrier_init, mbarrier_wait_parity_warp, opaque, prefetch_tensormap,
};
use crate::tile::config::Config;
use crate::tile::outputs::CONSUMERS;
use crate::tile::shape::BARRIER_BYTES;
use crate::tile::sizes::TileSizes;
use cubecl::prelude::*;

/// A position in the ring of stages: a stage, its barriers, and the parity of the phase to wait
/// for.
#[derive(CubeType, Clone, Copy)]
pub(super) struct PipelineState {
    /// Address of the first stage.
    stages: u32,
    /// Address of the barriers of the first stage.
    barriers: u32,
    /// Address of the current stage.
    pub stage: u32,
    /// Address of the current stage's barrier `full`; its barrier `empty` follows.
    pub full: u32,
    /// The parity of the pass.
    pub parity: u32,
    /// Address of the barrier `full` of the preceding stage, which is not released yet; 0 at the
    /// first stage.
    held: u32,
}

#[cube]
impl PipelineState {
    /// Returns the first stage of the first pass.
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

    /// Advances to the next stage; after the last stage, to the first stage of the next pass.
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

    /// Broadcasts the state from lane 0 to the warp. The compiler then keeps it in uniform
    /// registers, from which `wgmma` takes it.
    pub fn agree(&mut self) {
        bar_warp_sync();
        self.stage = plane_broadcast(self.stage, 0u32);
        self.full = plane_broadcast(self.full, 0u32);
        self.parity = plane_broadcast(self.parity, 0u32);
        self.held = plane_broadcast(self.held, 0u32);
    }

    /// Waits, as a consumer, for the copies of the stage.
    pub fn wait(&self) {
        mbarrier_wait_parity_warp(self.full, self.parity);
    }

    /// Releases the preceding stage, as a warp of consumers.
    ///
    /// The warp barrier in [`agree`](Self::agree) orders the reads of all lanes before the arrival
    /// of lane 0. `compute-sanitizer --tool racecheck` does not track this order through the
    /// arrival: it reports a race between the reads of all lanes except 0 and the next copies. It
    /// reports none if every lane arrives.
    pub fn release_last(&self) {
        if lane() == 0 && self.held != 0 {
            mbarrier_arrive(self.held + 8);
        }
    }
}

/// Initialises the barriers; called by one thread.
#[cube]
fn set_up(barriers: u32, #[comptime] config: Config) {
    #[unroll]
    for stage in 0..comptime!(config.tile.stages as u32) {
        let full = barriers + comptime!(stage * BARRIER_BYTES as u32);
        mbarrier_init(full, 1usize);
        mbarrier_init(full + 8, comptime!(config.tile.warps()));
    }
    // Makes the barriers visible to the copy engine.
    fence_proxy_async();
}

/// Runs the producer's warp: initialises the barriers, then copies the block's units, which end at
/// `end`.
///
/// The loop counters are [`opaque()`] so that NVRTC cannot unroll the loops: there is less code to
/// fetch, and a producer has few registers.
#[cube]
pub(super) fn produce(
    producer: &mut Producer,
    end: u32,
    source: &ProducerAddresses,
    sizes: &TileSizes,
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
        // Copies the weights of the first steps into all stages, and their activations once the
        // preceding kernel has computed them.
        let first = PipelineState::first(
            producer.state.stages,
            producer.state.barriers,
            producer.state.parity,
        );
        let mut ahead = Producer::new(first, producer.start, end, source, sizes, config);
        let mut filled = 0u32.runtime();
        while ahead.remaining_steps > 0 && filled < comptime!(config.tile.stages as u32) {
            ahead.expect_bytes(config);
            ahead.start_all(source, sizes, Operand::Weight, config);
            ahead.next(source, sizes, config);
            filled = opaque(filled + 1);
        }
        wait(true);
        while filled > 0 {
            producer.start_all(source, sizes, Operand::Activations, config);
            producer.next(source, sizes, config);
            filled = opaque(filled - 1);
        }
        while producer.remaining_steps > 0 {
            producer.wait_empty();
            producer.expect_bytes(config);
            producer.start_all(source, sizes, Operand::Both, config);
            producer.next(source, sizes, config);
        }
    }
}

/// Waits, as a consumer, until the producer has initialised the barriers.
#[cube]
pub(super) fn meet_producer(#[comptime] config: Config) {
    bar_sync(CONSUMERS, comptime!(config.tile.threads() + 32));
}

/// Fills the first stages in a block without a producer: one warp initialises the barriers, then
/// all warps fill all stages except two.
#[cube]
pub(super) fn fill_ahead(
    producer: &mut Producer,
    warp: u32,
    source: &ProducerAddresses,
    sizes: &TileSizes,
    #[comptime] config: Config,
) {
    if warp == 0 && elect_sync() {
        prefetch_tensormap(source.x_map);
        set_up(producer.state.barriers, config);
    }
    sync_cube();
    let mut filled = 0u32.runtime();
    while filled != comptime!(config.tile.stages as u32 - 2) {
        producer.share(warp, source, sizes, config);
        filled = opaque(filled + 1);
    }
}
