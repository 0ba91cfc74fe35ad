//! The exchange of sums through distributed shared memory, for a tile whose K is split among the
//! blocks of a cluster.
//!
//! Each block adds and writes the rows of some n8 tiles. It stores its sums of the other n8 tiles
//! in the shared memory of the blocks that add them. All blocks of a cluster run at the same time,
//! so they may wait for each other. Blocks that exchange sums through global memory may wait only
//! for earlier blocks, so there the last block of a tile adds the sums of all blocks.
//!
//! ```text
//! n8 tiles     0   1   2   3   4   5   6   7
//! added by     0   0   0   1   1   1   2   2       three blocks
//! block 1      ->0 ->0 ->0 own own own ->2 ->2     receives the n8 tiles 3, 4 and 5 of the blocks 0 and 2
//! ```
//!
//! A thread stores its sums at the position from which the thread of the same index in the
//! receiving block reads them.

use super::config::Config;
#[cfg(feature = "cubecl-runtime")]
use {
    crate::ptx::{
        F4, cluster_arrive_relaxed, cluster_wait, fence_mbarrier_init, ld_shared_f32_16, mapa,
        mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_first_phase_cluster,
        shared_address, st_async_16,
    },
    cubecl::prelude::*,
};

impl Config {
    /// Returns the number of n8 tiles whose sums a block adds: all n8 tiles of the tile or, in a
    /// cluster, the block's share. The last blocks of a cluster may add fewer.
    pub(crate) const fn batch_tiles_each(&self) -> usize {
        self.tile.batch_tiles.div_ceil(self.tile.cluster)
    }

    /// Returns the number of bytes of a block's sums of one n8 tile.
    const fn batch_tile_bytes(&self) -> usize {
        16 * self.tile.sub_tiles() * self.tile.threads()
    }

    /// Returns the number of bytes of the sums that a block of a cluster receives from all other
    /// blocks.
    pub(crate) const fn received_bytes(&self) -> usize {
        (self.tile.cluster - 1) * self.batch_tiles_each() * self.batch_tile_bytes()
    }
}

/// The place in shared memory where a block of a cluster receives sums.
#[cfg(feature = "cubecl-runtime")]
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Receiver {
    /// The shared-memory address of the sums of the other blocks, in the order of their ranks.
    sums: u32,
    /// The shared-memory address of the barrier that counts the bytes of these sums.
    barrier: u32,
    /// The block's rank in its cluster.
    pub rank: u32,
}

#[cfg(feature = "cubecl-runtime")]
#[cube]
impl Receiver {
    /// Creates the receiver at the start of a block; called by all threads. Initialises the barrier
    /// before other blocks of the cluster store sums. A block that is not in a cluster receives
    /// nothing.
    pub fn new(#[comptime] config: Config) -> Receiver {
        if comptime!(config.tile.is_clustered()) {
            let sums = Shared::<[f32]>::new_aligned_slice(
                comptime!(config.received_bytes() / 4),
                128usize,
            );
            let barrier = Shared::<[u64]>::new_aligned_slice(1usize, 8usize);
            let barrier = shared_address::<u64>(&barrier);
            let rank = CUBE_POS_X % comptime!(config.tile.cluster as u32);
            if UNIT_POS_X == 0 {
                let (each, batch_tiles) = comptime!((
                    config.batch_tiles_each() as u32,
                    config.tile.batch_tiles as u32
                ));
                let own = min(each, max(batch_tiles, rank * each) - rank * each);
                mbarrier_init(barrier, 1usize);
                mbarrier_arrive_expect_tx(
                    barrier,
                    own * comptime!(((config.tile.cluster - 1) * config.batch_tile_bytes()) as u32),
                );
                fence_mbarrier_init();
            }
            cluster_arrive_relaxed();
            Receiver {
                sums: shared_address::<f32>(&sums),
                barrier,
                rank,
            }
        } else {
            Receiver {
                sums: 0u32.runtime(),
                barrier: 0u32.runtime(),
                rank: 0u32.runtime(),
            }
        }
    }

    /// Exchanges sums with the other blocks of the cluster. Writes to `added` the sums of all
    /// blocks for the n8 tiles that this block adds, always added in the same order. `sums` are the
    /// block's own sums. The order of `sums` and `added` is `[sub-tile, n8 tile]`.
    pub fn exchange(&self, sums: &Array<F4>, added: &mut Array<F4>, #[comptime] config: Config) {
        let (each, sub_tiles, batch_tiles) = comptime!((
            config.batch_tiles_each(),
            config.tile.sub_tiles(),
            config.tile.batch_tiles
        ));
        let fragment_bytes = comptime!(16 * config.tile.threads());
        let thread = UNIT_POS_X * 16;
        // Once this wait returns, all blocks of the cluster have started.
        cluster_wait();
        #[unroll]
        for owner in 0..comptime!(batch_tiles.div_ceil(each)) {
            let owner_rank = comptime!(owner as u32);
            let count = comptime!(if (owner + 1) * each < batch_tiles {
                each
            } else {
                batch_tiles - owner * each
            });
            if self.rank == owner_rank {
                #[unroll]
                for i in 0..count {
                    #[unroll]
                    for j in 0..sub_tiles {
                        added[comptime!(j * each + i)] =
                            sums[comptime!(j * batch_tiles + owner * each + i)];
                    }
                }
            } else {
                let place = if self.rank < owner_rank {
                    self.rank
                } else {
                    self.rank - 1
                };
                let own = self.sums
                    + place * comptime!((each * config.batch_tile_bytes()) as u32)
                    + thread;
                let (to, barrier) = (
                    mapa(own, owner_rank.runtime()),
                    mapa(self.barrier, owner_rank.runtime()),
                );
                #[unroll]
                for i in 0..count {
                    #[unroll]
                    for j in 0..sub_tiles {
                        let at = comptime!(((i * sub_tiles + j) * fragment_bytes) as u32);
                        st_async_16(
                            to + at,
                            sums[comptime!(j * batch_tiles + owner * each + i)],
                            barrier,
                        );
                    }
                }
            }
        }
        mbarrier_wait_first_phase_cluster(self.barrier);
        #[unroll]
        for place in 0..comptime!(config.tile.cluster - 1) {
            #[unroll]
            for i in 0..each {
                #[unroll]
                for j in 0..sub_tiles {
                    let at = comptime!(
                        ((place * each + i) * config.batch_tile_bytes() + j * fragment_bytes)
                            as u32
                    );
                    added[comptime!(j * each + i)] += ld_shared_f32_16(self.sums + thread + at);
                }
            }
        }
    }
}
