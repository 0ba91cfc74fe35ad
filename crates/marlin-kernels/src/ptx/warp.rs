//! Exchange of values among the threads of a warp.

use super::read;
use cubecl::prelude::*;

/// `redux.sync.max.u32`: returns the largest value of the warp's threads ("Parallel Synchronization
/// and Communication Instructions: redux.sync"), from compute capability 8.0 on.
#[cube]
pub fn redux_max(value: u32) -> u32 {
    let most: u32;
    gpu_asm!("redux.sync.max.u32 {m}, {v}, 0xffffffff;", m = out(_) most, v = in(_) read::<u32>(value));
    read::<u32>(most)
}

/// `redux.sync.min.u32`: returns the smallest value of the warp's threads.
#[cube]
pub fn redux_min(value: u32) -> u32 {
    let least: u32;
    gpu_asm!("redux.sync.min.u32 {m}, {v}, 0xffffffff;", m = out(_) least, v = in(_) read::<u32>(value));
    read::<u32>(least)
}

/// `match.any.sync.b32`: returns a bit for each thread of the warp, 1 if it has the same value
/// ("Parallel Synchronization and Communication Instructions: match.sync").
#[cube]
pub fn match_any(value: u32) -> u32 {
    let lanes: u32;
    gpu_asm!("match.any.sync.b32 {l}, {v}, 0xffffffff;", l = out(_) lanes, v = in(_) read::<u32>(value));
    read::<u32>(lanes)
}
