//! The choice of experts and the sorting of rows by expert, for many tokens.

use super::choose::{choose, load_logits, values_of_lane};
use super::{CHOOSE_UNITS, UNITS, WARP};
use crate::experts::Router;
use crate::experts::router::MAX_EXPERTS;
use crate::pdl::launch_dependents_and_wait;
use crate::ptx::{U4, bar_warp_sync, lane, match_any};
use cubecl::prelude::*;

/// The number of counts of rows in shared memory: those of each expert among the rows of a warp.
const COUNTS: usize = 8192;
/// The expert of a row that does not exist.
const NO_EXPERT: u32 = u32::MAX;
/// The number of rows whose experts are kept in shared memory; others are read again.
const SHARED_ROWS: usize = 4096;

/// Returns the number of warps that sort rows.
const fn sorters(router: &Router) -> usize {
    let most = COUNTS / router.experts;
    if most < UNITS / WARP {
        most
    } else {
        UNITS / WARP
    }
}

/// Chooses the experts of tokens, a warp a token, and sorts the rows by expert.
#[cube(launch_unchecked)]
pub(crate) fn choose_and_sort<F: Float>(
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
    let mut of_row = Shared::<[u32]>::new_slice(SHARED_ROWS);
    let (warp, lane) = (UNIT_POS_X / 32, lane());
    let mut token = warp;
    while token < count {
        let mut values = Array::<f32>::new(comptime!(values_of_lane(&router)));
        load_logits::<F>(logits, token, lane, &mut values, router);
        let (expert, weight) = choose(&mut values, &correction, lane, factor, router, halves);
        if lane < comptime!(router.top_k as u32) {
            let row = token * comptime!(router.top_k as u32) + lane;
            experts[row as usize] = expert;
            weights[row as usize] = weight;
            if row < comptime!(SHARED_ROWS as u32) {
                of_row[row as usize] = expert;
            }
        }
        token += comptime!((UNITS / WARP) as u32);
    }
    sort(
        experts, &of_row, places, tokens, row_blocks, count, router, block_rows,
    );
}

/// Chooses the experts of tokens, a warp a token, for [`sort_chosen`].
#[cube(launch_unchecked)]
pub(crate) fn choose_experts<F: Float>(
    logits: &[F],
    correction: ComptimeOption<&[f32]>,
    experts: &mut [u32],
    weights: &mut [f32],
    count: u32,
    factor: f32,
    #[comptime] router: Router,
    #[comptime] halves: bool,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let token = CUBE_POS_X * comptime!((CHOOSE_UNITS / WARP) as u32) + UNIT_POS_X / 32;
    let lane = lane();
    if token < count {
        let mut values = Array::<f32>::new(comptime!(values_of_lane(&router)));
        load_logits::<F>(logits, token, lane, &mut values, router);
        let (expert, weight) = choose(&mut values, &correction, lane, factor, router, halves);
        if lane < comptime!(router.top_k as u32) {
            let row = token * comptime!(router.top_k as u32) + lane;
            experts[row as usize] = expert;
            weights[row as usize] = weight;
        }
    }
}

/// Sorts the rows of tokens by expert, after [`choose_experts`].
#[cube(launch_unchecked)]
pub(crate) fn sort_chosen(
    experts: &mut [u32],
    places: &mut [u32],
    tokens: &mut [u32],
    row_blocks: &mut [U4],
    count: u32,
    #[comptime] router: Router,
    #[comptime] block_rows: usize,
    #[comptime] uses_pdl: bool,
) {
    launch_dependents_and_wait(uses_pdl);
    let mut of_row = Shared::<[u32]>::new_slice(SHARED_ROWS);
    let rows = min(
        count * comptime!(router.top_k as u32),
        comptime!(SHARED_ROWS as u32),
    );
    let mut row = UNIT_POS_X;
    while row < rows {
        of_row[row as usize] = experts[row as usize];
        row += comptime!(UNITS as u32);
    }
    sort(
        experts, &of_row, places, tokens, row_blocks, count, router, block_rows,
    );
}

/// Sorts the rows of tokens by expert. Rows of an expert keep their order, so that the result
/// depends on the logits alone. The experts of the first rows are in `of_row`, too.
///
/// Every warp has consecutive rows and counts those of each expert. The rows of an expert in the
/// warps before a warp, and those before in the warp, are its place.
#[cube]
fn sort(
    experts: &mut [u32],
    of_row: &Shared<[u32]>,
    places: &mut [u32],
    tokens: &mut [u32],
    row_blocks: &mut [U4],
    count: u32,
    #[comptime] router: Router,
    #[comptime] block_rows: usize,
) {
    let mut starts = Shared::<[u32]>::new_slice(comptime!(router.experts));
    let mut counts = Shared::<[u32]>::new_slice(comptime!(sorters(&router) * router.experts));
    let (warp, lane) = (UNIT_POS_X / 32, lane());
    let rows = count * comptime!(router.top_k as u32);
    // Each of the sorters has this many times 32 rows, and the last ones may have none.
    let runs = rows
        .div_ceil(32u32)
        .div_ceil(comptime!(sorters(&router) as u32));
    let sorters = rows.div_ceil(runs * 32);

    let mut at = UNIT_POS_X;
    while at < sorters * comptime!(router.experts as u32) {
        counts[at as usize] = 0u32.runtime();
        at += comptime!(UNITS as u32);
    }
    sync_cube();

    if warp < sorters {
        for run in 0..runs {
            let row = (warp * runs + run) * 32 + lane;
            let (expert, lanes) = expert_of(row, rows, experts, of_row);
            count_rows(&mut counts, warp, lane, expert, lanes, router);
        }
    }
    sync_cube();

    let mut expert = UNIT_POS_X;
    while expert < comptime!(router.experts as u32) {
        let mut before = 0u32.runtime();
        for sorter in 0..sorters {
            let at = (sorter * comptime!(router.experts as u32) + expert) as usize;
            let own = counts[at];
            counts[at] = before;
            before += own;
        }
        starts[expert as usize] = before;
        expert += comptime!(UNITS as u32);
    }
    sync_cube();

    if warp == 0 {
        cut(&mut starts, row_blocks, lane, router, block_rows);
    }
    sync_cube();

    if warp < sorters {
        for run in 0..runs {
            let row = (warp * runs + run) * 32 + lane;
            let (expert, lanes) = expert_of(row, rows, experts, of_row);
            if row < rows {
                let before = counts[(warp * comptime!(router.experts as u32) + expert) as usize];
                let place =
                    starts[expert as usize] + before + (lanes & lanes_before(lane)).count_ones();
                places[row as usize] = place;
                tokens[place as usize] = row / comptime!(router.top_k as u32);
            }
            bar_warp_sync();
            count_rows(&mut counts, warp, lane, expert, lanes, router);
        }
    }
}

/// Returns a bit for each lane before a lane.
#[cube]
fn lanes_before(lane: u32) -> u32 {
    (1u32 << lane) - 1
}

/// Returns the expert of a row, and a bit for each lane of the warp: 1 if its row has this expert.
#[cube]
fn expert_of(row: u32, rows: u32, experts: &mut [u32], of_row: &Shared<[u32]>) -> (u32, u32) {
    let mut expert = NO_EXPERT.runtime();
    if row < rows {
        if row < comptime!(SHARED_ROWS as u32) {
            expert = of_row[row as usize];
        } else {
            expert = experts[row as usize];
        }
    }
    (expert, match_any(expert))
}

/// Adds a warp's 32 rows to its counts; `lanes` are those with a lane's expert.
#[cube]
fn count_rows(
    counts: &mut Shared<[u32]>,
    warp: u32,
    lane: u32,
    expert: u32,
    lanes: u32,
    #[comptime] router: Router,
) {
    if expert != NO_EXPERT && lanes & lanes_before(lane) == 0 {
        let at = (warp * comptime!(router.experts as u32) + expert) as usize;
        counts[at] += lanes.count_ones();
    }
    bar_warp_sync();
}

/// Replaces the numbers of rows of experts by their first rows, and writes the blocks of rows.
#[cube]
fn cut(
    starts: &mut Shared<[u32]>,
    row_blocks: &mut [U4],
    lane: u32,
    #[comptime] router: Router,
    #[comptime] block_rows: usize,
) {
    let mut rows_before = 0u32.runtime();
    let mut blocks_before = 0u32.runtime();
    for run in 0..comptime!(router.experts.div_ceil(WARP) as u32) {
        let expert = run * 32 + lane;
        let mut rows = 0u32.runtime();
        if expert < comptime!(router.experts as u32) {
            rows = starts[expert as usize];
        }
        let blocks = rows.div_ceil(comptime!(block_rows as u32));
        let (rows_until, blocks_until) = (plane_inclusive_sum(rows), plane_inclusive_sum(blocks));
        let first_row = rows_before + rows_until - rows;
        let first_block = blocks_before + blocks_until - blocks;
        if expert < comptime!(router.experts as u32) {
            starts[expert as usize] = first_row;
        }
        let mut block = 0u32.runtime();
        while block < blocks {
            let before = block * comptime!(block_rows as u32);
            let mut entry = U4::new(0u32);
            entry.insert(0usize, expert);
            entry.insert(1usize, first_row + before);
            entry.insert(2usize, min(rows - before, comptime!(block_rows as u32)));
            row_blocks[(1 + first_block + block) as usize] = entry;
            block += 1;
        }
        rows_before += plane_shuffle(rows_until, 31u32);
        blocks_before += plane_shuffle(blocks_until, 31u32);
    }
    if lane == 0 {
        let mut entry = U4::new(0u32);
        entry.insert(0usize, blocks_before);
        row_blocks[0] = entry;
    }
}

const _: () = assert!(MAX_EXPERTS <= COUNTS, "at least one warp sorts");
