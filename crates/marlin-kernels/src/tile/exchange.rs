//! Partial sums passed from one block to another, through a workspace in global memory.
//!
//! A thread stores its totals of a tile at the position from which the thread of the same index in
//! the block that finishes the tile reads them. Both threads have the same outputs, so the order of
//! the stored sums does not matter.
//!
//! | totals of a thread | storage of the sums | signal that the sums are stored |
//! |---|---|---|
//! | few | a mark with each, in 64 bits | the mark: one round trip, no barrier, twice the bytes |
//! | many | four sums in 16 bytes | a flag for the block, released after a barrier |
//!
//! The block that reads the sums clears the marks or the flag for the next launch. A block stores
//! sums at most once in a launch, and one block reads them.

use super::config::Config;
#[cfg(feature = "cubecl-runtime")]
use {
    super::outputs::{has_output, output, sync_consumers},
    crate::ptx::{
        ld_acquire, ld_global_16, ld_marked, st_global_16, st_marked, st_relaxed, st_release,
    },
    cubecl::prelude::*,
};

/// The number of words with marks for which a thread waits at the same time.
const LOADS_IN_FLIGHT: usize = 8;
/// The number of bytes of a flag. Blocks that wait for different flags read different cache lines.
const FLAG_BYTES: usize = 128;
/// The number of blocks that have a flag: more than any card has multiprocessors.
pub(crate) const MAX_BLOCKS: usize = 512;
/// The number of bytes of all flags. The sums follow the flags.
pub(crate) const FLAGS_BYTES: usize = MAX_BLOCKS * FLAG_BYTES;

impl Config {
    /// Returns true if a block's sums are stored under one flag; otherwise each sum has a mark.
    pub(crate) const fn is_flagged(&self) -> bool {
        self.outputs() >= 12 && self.outputs().is_multiple_of(4)
    }

    /// Returns the number of bytes of a block's sums in the workspace.
    pub(crate) const fn partial_bytes(&self) -> usize {
        if self.is_flagged() {
            4 * self.outputs() * self.tile.threads()
        } else {
            8 * self.tile.rows() * self.tile.columns()
        }
    }
}

/// Stores a thread's totals in the block's area of the workspace. `rows` is the number of rows of
/// activations from the tile's first row on.
#[cfg(feature = "cubecl-runtime")]
#[cube]
pub(crate) fn store(totals: &Array<f32>, workspace: u64, rows: u32, #[comptime] config: Config) {
    if comptime!(config.is_flagged()) {
        let own = flagged_sums(workspace, CUBE_POS_X, config);
        #[unroll]
        for four in 0..comptime!(config.outputs() / 4) {
            let mut values = Vector::<f32, Const<4>>::new(0.0);
            #[unroll]
            for i in 0..4usize {
                values.insert(i, totals[comptime!(4 * four + i)]);
            }
            st_global_16(
                own + comptime!((16 * four * config.tile.threads()) as u64),
                values,
            );
        }
        sync_consumers(config);
        if UNIT_POS_X == 0 {
            st_release(flag(workspace, CUBE_POS_X), 1u32.runtime());
        }
    } else {
        let own = marked_sums(workspace, CUBE_POS_X, config);
        #[unroll]
        for i in 0..comptime!(config.outputs()) {
            if has_output(i, rows, config) {
                st_marked(
                    own + u64::cast_from(output(i, config) * 8),
                    totals[i],
                    1u32.runtime(),
                );
            }
        }
    }
}

/// Waits until block `other` has stored its sums, and adds them to a thread's totals.
#[cfg(feature = "cubecl-runtime")]
#[cube]
pub(crate) fn add(
    totals: &mut Array<f32>,
    other: u32,
    workspace: u64,
    rows: u32,
    #[comptime] config: Config,
) {
    if comptime!(config.is_flagged()) {
        add_flagged(totals, other, workspace, config);
    } else {
        add_marked(totals, other, workspace, rows, config);
    }
}

#[cfg(feature = "cubecl-runtime")]
#[cube]
fn add_flagged(totals: &mut Array<f32>, other: u32, workspace: u64, #[comptime] config: Config) {
    if UNIT_POS_X == 0 {
        let flag = flag(workspace, other);
        while ld_acquire(flag) == 0 {}
        // The store is relaxed, because no other write has to be visible before it, and all threads
        // would wait for a release.
        st_relaxed(flag, 0u32.runtime());
    }
    sync_consumers(config);
    let sums = flagged_sums(workspace, other, config);
    let fours = comptime!(config.outputs() / 4);
    let mut values = Array::<Vector<f32, Const<4>>>::new(fours);
    #[unroll]
    for four in 0..fours {
        values[four] = ld_global_16(sums + comptime!((16 * four * config.tile.threads()) as u64));
    }
    #[unroll]
    for four in 0..fours {
        #[unroll]
        for i in 0..4usize {
            totals[comptime!(4 * four + i)] += values[four].extract(i);
        }
    }
}

#[cfg(feature = "cubecl-runtime")]
#[cube]
fn add_marked(
    totals: &mut Array<f32>,
    other: u32,
    workspace: u64,
    rows: u32,
    #[comptime] config: Config,
) {
    let sums = marked_sums(workspace, other, config);
    let outputs = comptime!(config.outputs());
    #[unroll]
    for round in 0..comptime!(outputs.div_ceil(LOADS_IN_FLIGHT)) {
        let first = comptime!(round * LOADS_IN_FLIGHT);
        let loads = comptime!(if outputs - first < LOADS_IN_FLIGHT {
            outputs - first
        } else {
            LOADS_IN_FLIGHT
        });
        let mut values = Array::<f32>::new(loads);
        let mut missing = 1u32.runtime();
        while missing != 0 {
            missing = 0u32.runtime();
            #[unroll]
            for i in 0..loads {
                if has_output(comptime!(first + i), rows, config) {
                    let (value, mark) =
                        ld_marked(sums + u64::cast_from(output(comptime!(first + i), config) * 8));
                    values[i] = value;
                    missing |= mark ^ 1;
                }
            }
        }
        #[unroll]
        for i in 0..loads {
            if has_output(comptime!(first + i), rows, config) {
                let place = sums + u64::cast_from(output(comptime!(first + i), config) * 8);
                st_marked(place, 0.0f32.runtime(), 0u32.runtime());
                totals[comptime!(first + i)] += values[i];
            }
        }
    }
}

/// Returns the address of a block's flag.
#[cfg(feature = "cubecl-runtime")]
#[cube]
fn flag(workspace: u64, block: u32) -> u64 {
    workspace + u64::cast_from(block * comptime!(FLAG_BYTES as u32))
}

/// Returns the address of a thread's first four sums of a block whose sums are under a flag.
#[cfg(feature = "cubecl-runtime")]
#[cube]
fn flagged_sums(workspace: u64, block: u32, #[comptime] config: Config) -> u64 {
    let block = u64::cast_from(block) * comptime!(config.partial_bytes() as u64);
    workspace + comptime!(FLAGS_BYTES as u64) + block + u64::cast_from(UNIT_POS_X * 16)
}

/// Returns the address of a block's sums if each sum has a mark.
#[cfg(feature = "cubecl-runtime")]
#[cube]
fn marked_sums(workspace: u64, block: u32, #[comptime] config: Config) -> u64 {
    workspace + u64::cast_from(block) * comptime!(config.partial_bytes() as u64)
}
