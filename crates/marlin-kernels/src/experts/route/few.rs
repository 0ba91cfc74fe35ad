//! The routing of few tokens: their rows are the lanes of one warp.

use super::WARP;
use super::choose::{choose, load_logits, values_of_lane};
use crate::experts::Router;
use crate::pdl::launch_dependents_and_wait;
use crate::ptx::{U4, bar_warp_sync, lane, match_any};
use cubecl::prelude::*;

/// Returns true if the rows of a number of tokens are lanes of one warp.
pub(super) const fn is_few(router: &Router, tokens: usize) -> bool {
    tokens * router.top_k <= WARP
}

/// The expert of a lane without a row, after all experts.
const NO_EXPERT: u32 = u32::MAX;

/// Chooses the experts of tokens, a warp a token, and sorts the rows by expert, as
/// [`choose_and_sort`](super::sort::choose_and_sort) does. The first warp sorts: a lane has a row.
#[cube(launch_unchecked)]
pub(crate) fn choose_and_sort_few<F: Float>(
    logits: &[F],
    correction: ComptimeOption<&[f32]>,
    experts: &mut [u32],
    weights: &mut [f32],
    places: &mut [u32],
    tokens: &mut [u32],
    row_blocks: &mut [U4],
    count: u32,
    factor: f32,
    #[comptime] router: Router,
    #[comptime] halves: bool,
    #[comptime] block_rows: usize,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let mut of_row = Shared::<[u32]>::new_slice(WARP);
    let mut sorted = Shared::<[u32]>::new_slice(WARP);
    let (token, lane) = (UNIT_POS_X / 32, lane());
    let top_k = comptime!(router.top_k as u32);
    let rows = count * top_k;
    let mut values = Array::<f32>::new(comptime!(values_of_lane(&router)));
    load_logits::<F>(logits, token, lane, &mut values, router);
    let (expert, weight) = choose(&mut values, &correction, lane, factor, router, halves);
    if lane < top_k {
        let row = token * top_k + lane;
        experts[row as usize] = expert;
        weights[row as usize] = weight;
        of_row[row as usize] = expert;
    }
    sync_cube();
    if token == 0 {
        let mut expert = NO_EXPERT.runtime();
        if lane < rows {
            expert = of_row[lane as usize];
        }
        // The place of a row is the number of rows with a smaller expert, and of those before it
        // with the same expert.
        let mut place = 0u32.runtime();
        #[unroll]
        for other in 0..comptime!(WARP as u32) {
            let of_other = plane_shuffle(expert, other);
            let is_before = of_other < expert || (of_other == expert && other < lane);
            place += select(is_before, 1u32.runtime(), 0u32.runtime());
        }
        sorted[place as usize] = expert;
        if lane < rows {
            places[lane as usize] = place;
            tokens[place as usize] = lane / top_k;
        }
        bar_warp_sync();
        // The same lanes as rows in the order of experts, of which some are the first of a block.
        let expert = sorted[lane as usize];
        let same = match_any(expert);
        let (first, of_expert) = (first_lane(same), same.count_ones());
        let is_first = expert != NO_EXPERT && (lane - first) % comptime!(block_rows as u32) == 0;
        let alike = match_any(select(is_first, 1u32.runtime(), 0u32.runtime()));
        let firsts = select(is_first, alike, !alike);
        if is_first {
            let block = (firsts & ((1u32 << lane) - 1)).count_ones();
            let mut entry = U4::new(0u32);
            entry.insert(0usize, expert);
            entry.insert(1usize, lane);
            entry.insert(
                2usize,
                min(first + of_expert - lane, comptime!(block_rows as u32)),
            );
            row_blocks[(1 + block) as usize] = entry;
        }
        if lane == 0 {
            let mut entry = U4::new(0u32);
            entry.insert(0usize, firsts.count_ones());
            row_blocks[0] = entry;
        }
    }
}

/// Returns the first of some lanes.
#[cube]
fn first_lane(lanes: u32) -> u32 {
    ((lanes & (!lanes + 1)) - 1).count_ones()
}
