//! The copy pipeline of `mma.sync`: every warp copies from global memory into the stages with
//! `cp.async`.

use super::copies::{Copies, CopyAddresses, team_threads};
use crate::pdl::wait;
use crate::ptx::{
    bar_sync_numbered, bar_warp_sync, cp_async_commit_group, cp_async_wait_group, opaque,
};
use crate::tile::config::Config;
use crate::tile::sizes::TileSizes;
use crate::tile::stripe::TilePart;
use cubecl::prelude::*;

/// The copies of a stripe, which run ahead of its products by all stages except the stage that is
/// being multiplied.
#[derive(CubeType, Clone, Copy)]
pub(super) struct CopyAhead {
    /// The thread's next copies.
    copies: Copies,
    /// The part of the tile that the next copies belong to.
    part: TilePart,
    /// The first unit of the stripe.
    start: u32,
    /// Units that are not copied yet.
    to_copy: u32,
}

#[cube]
impl CopyAhead {
    /// Creates the copies of a stripe of at least one unit, at its start.
    pub fn new(start: u32, end: u32, sizes: &TileSizes, #[comptime] config: Config) -> CopyAhead {
        CopyAhead {
            copies: Copies::new(sizes, config),
            part: TilePart::last(sizes, start, end),
            start,
            to_copy: end - start,
        }
    }

    /// Starts the copies of the first steps, into all stages except the last. If the kernel
    /// `uses_pdl`, it overlaps the preceding kernel, which computes the activations, so the weight
    /// is first prefetched to the second-level cache. It is not copied to the stages before the
    /// activations are available: groups of `cp.async` complete in order, so the products of the
    /// first stage would have to wait for the weights of all stages.
    pub fn fill(
        &mut self,
        stages: u32,
        source: &CopyAddresses,
        sizes: &TileSizes,
        #[comptime] config: Config,
        #[comptime] uses_pdl: bool,
    ) {
        self.copies
            .enter(self.part.tile, self.part.first, source, sizes, true, config);
        if uses_pdl {
            let steps = min(
                self.part.end - self.part.first,
                comptime!(config.tile.stages as u32 - 1),
            );
            self.copies.prefetch(steps, sizes, config);
            wait(true);
        }
        let mut stage = stages;
        // The compiler cannot unroll this loop, so there is less code to fetch before the first
        // copy.
        while stage != stages + comptime!(((config.tile.stages - 1) * config.stage_bytes()) as u32)
        {
            self.copy(stage, source, sizes, config);
            stage = opaque(stage + comptime!(config.stage_bytes() as u32));
        }
    }

    /// Waits until a team's part of a stage has arrived and the team's warps are done with the
    /// preceding stage, and refills the preceding stage.
    pub fn step(
        &mut self,
        stage: u32,
        stages: u32,
        source: &CopyAddresses,
        sizes: &TileSizes,
        #[comptime] config: Config,
    ) {
        cp_async_wait_group(comptime!(config.tile.stages - 2));
        sync_team(config);
        let stage_bytes = comptime!(config.stage_bytes() as u32);
        let before = if stage == stages {
            stage + comptime!((config.tile.stages as u32 - 1) * stage_bytes)
        } else {
            stage - stage_bytes
        };
        self.copy(before, source, sizes, config);
    }

    /// Starts the copies of one step, and advances to the next step.
    fn copy(
        &mut self,
        stage: u32,
        source: &CopyAddresses,
        sizes: &TileSizes,
        #[comptime] config: Config,
    ) {
        if self.to_copy > 0 {
            self.copies.start(sizes, stage, config);
            self.to_copy -= 1;
            self.part.first += 1;
            if self.part.first == self.part.end {
                self.part.next(sizes, self.start, config);
                self.copies.enter(
                    self.part.tile,
                    self.part.first,
                    source,
                    sizes,
                    false,
                    config,
                );
            }
        }
        cp_async_commit_group();
    }
}

/// Waits for the other warps of a team. A team is the warps side by side along N, which read the
/// same activations. Teams share no data in a stage, so each runs at its own pace. On an H200 this
/// makes a launch of one row on Llama 2 7B's weights 4 to 8 % shorter than with a barrier of the
/// block.
#[cube]
fn sync_team(#[comptime] config: Config) {
    if comptime!(config.tile.warps_n == 1) {
        bar_warp_sync();
    } else if comptime!(config.tile.warps_k == 1) {
        sync_cube();
    } else {
        // Barrier 0 is the barrier of the block.
        bar_sync_numbered(
            1 + UNIT_POS_X / comptime!(team_threads(&config)),
            comptime!(team_threads(&config) as usize),
        );
    }
}
