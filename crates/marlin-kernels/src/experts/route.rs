use super::Router;
use super::choose::choose;
use super::route_few::{choose_and_sort_few, is_few};
use super::router::MAX_EXPERTS;
use crate::pdl::{self, launch_dependents_and_wait};
use crate::problem::expect_length;
use crate::ptx::{U4, bar_warp_sync, lane, match_any};
use crate::{ActivationDtype, KernelError, Target};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The number of units of the only cube for many tokens.
const UNITS: usize = 1024;
/// The number of threads of a warp.
pub(super) const WARP: usize = 32;
/// The number of counts of rows in shared memory: those of each expert among the rows of a warp.
const COUNTS: usize = 8192;
/// The expert of a row that does not exist.
const NO_EXPERT: u32 = u32::MAX;
/// The number of rows whose experts are kept in shared memory; others are read again.
const SHARED_ROWS: usize = 4096;

/// The experts of tokens on the device, for the kernels of a layer that follow.
///
/// | buffer | shape | holds |
/// |---|---|---|
/// | `experts` | [tokens, top_k] u32 | the experts of each token, the best first |
/// | `weights` | [tokens, top_k] f32 | their weights; NaN if a logit of the token is not finite |
/// | `places` | [tokens, top_k] u32 | the row of each in the order of experts |
/// | `tokens` | [tokens x top_k] u32 | the token of each row in the order of experts |
/// | `row_blocks` | [1 + blocks, 4] u32 | the number of blocks; then each block's expert, first row and number of rows |
#[derive(Debug, Clone)]
pub struct Routing {
    /// The router.
    pub router: Router,
    /// The number of tokens.
    pub count: usize,
    /// The maximum number of rows of a block.
    pub block_rows: usize,
    /// The experts of each token.
    pub experts: Handle,
    /// The weights of a token's experts.
    pub weights: Handle,
    /// The rows of a token's experts.
    pub places: Handle,
    /// The token of each row.
    pub tokens: Handle,
    /// The blocks of rows.
    pub row_blocks: Handle,
    /// True if a kernel was launched that waits for the routing before it lets the next one start.
    /// Kernels after it need not wait for the routing themselves.
    pub(super) is_complete: Arc<AtomicBool>,
}

impl Routing {
    /// Returns the number of rows: one for each expert of each token.
    pub fn rows(&self) -> usize {
        self.count * self.router.top_k
    }

    /// Returns the maximum number of blocks of rows.
    pub fn most_blocks(&self) -> usize {
        most_blocks(&self.router, self.count, self.block_rows)
    }

    /// Returns a table with an element for each row as an argument of a kernel.
    pub(super) fn of_rows(&self, table: &Handle) -> BufferArg {
        // SAFETY: the tables were allocated with an element for each row.
        unsafe { BufferArg::from_raw_parts(table.clone(), self.rows()) }
    }

    /// Returns the blocks of rows as an argument of a kernel.
    pub(super) fn blocks(&self) -> BufferArg {
        // SAFETY: the table was allocated with these elements.
        unsafe { BufferArg::from_raw_parts(self.row_blocks.clone(), 4 * (1 + self.most_blocks())) }
    }
}

/// Returns the maximum number of blocks of rows: every expert that has rows may have one block that
/// is not full.
fn most_blocks(router: &Router, tokens: usize, block_rows: usize) -> usize {
    let rows = tokens * router.top_k;
    rows.min(rows / block_rows + router.experts)
}

/// Operands of [`route`]. All are contiguous.
pub struct RouteOperands {
    /// The router's logits [tokens, experts].
    pub logits: BufferArg,
    /// The dtype of the logits.
    pub dtype: ActivationDtype,
    /// What is added to the scores before experts are chosen, `[experts]` in f32; for
    /// [`RouterScores::Sigmoid`](super::RouterScores::Sigmoid).
    pub correction: Option<BufferArg>,
    /// The factor of all weights.
    pub factor: f32,
}

/// Chooses the experts of `count` tokens, and sorts their rows by expert in blocks of at most
/// `block_rows` rows. One block of threads does this.
///
/// # Errors
/// The errors of [`Router::check`], and an error for a buffer of the wrong length or blocks of no
/// rows.
pub fn route(
    client: &Client,
    router: Router,
    count: usize,
    block_rows: usize,
    operands: RouteOperands,
) -> Result<Routing, KernelError> {
    let RouteOperands {
        logits,
        dtype,
        correction,
        factor,
    } = operands;
    router.check()?;
    let problem = format!("{count} tokens, {} experts", router.experts);
    if block_rows == 0 {
        return Err(KernelError::Shape {
            problem,
            reason: "a block has at least one row; take the rows that `plan` gives",
        });
    }
    expect_length(&problem, "logits", count * router.experts, logits.len())?;
    if let Some(correction) = &correction {
        expect_length(&problem, "correction", router.experts, correction.len())?;
    }
    let rows = count * router.top_k;
    let of_rows = || client.empty(rows.max(1) * size_of::<u32>());
    let blocks = 1 + most_blocks(&router, count, block_rows);
    let routing = Routing {
        router,
        count,
        block_rows,
        experts: of_rows(),
        weights: of_rows(),
        places: of_rows(),
        tokens: of_rows(),
        row_blocks: client.empty(blocks * 4 * size_of::<u32>()),
        is_complete: Arc::default(),
    };
    if count == 0 {
        return Ok(routing);
    }
    let uses_pdl = pdl::is_supported(&Target::of(client));
    let [experts, weights, places, tokens] = [
        &routing.experts,
        &routing.weights,
        &routing.places,
        &routing.tokens,
    ]
    .map(|table| routing.of_rows(table));
    // SAFETY: the lengths of the buffers were checked, or they were allocated, for `count` tokens.
    unsafe {
        if is_few(&router, count) {
            choose_and_sort_few::launch_unchecked(
                client,
                CubeCount::new_single(),
                CubeDim::new_1d(units(&router, count) as u32),
                logits,
                correction.into(),
                experts,
                weights,
                places,
                tokens,
                routing.blocks(),
                count as u32,
                factor,
                router,
                block_rows,
                uses_pdl,
                dtype.elem(),
            );
        } else {
            choose_and_sort::launch_unchecked(
                client,
                CubeCount::new_single(),
                CubeDim::new_1d(units(&router, count) as u32),
                logits,
                correction.into(),
                experts,
                weights,
                places,
                tokens,
                routing.blocks(),
                count as u32,
                factor,
                router,
                block_rows,
                uses_pdl,
                dtype.elem(),
            );
        }
    }
    pdl::make_edge_programmatic(client);
    Ok(routing)
}

/// Returns the number of units of the cube for a number of tokens.
pub(super) const fn units(router: &Router, tokens: usize) -> usize {
    if is_few(router, tokens) {
        tokens * WARP
    } else {
        UNITS
    }
}

/// Returns the number of warps that sort rows.
const fn sorters(router: &Router) -> usize {
    let most = COUNTS / router.experts;
    if most < UNITS / WARP {
        most
    } else {
        UNITS / WARP
    }
}

/// Chooses the experts of tokens, a warp a token, and sorts the rows by expert. Rows of an expert
/// keep their order, so that the result depends on the logits alone.
///
/// For the sort, every warp has consecutive rows and counts those of each expert. The rows of an
/// expert in the warps before a warp, and those before in the warp, are its place.
#[cube(launch_unchecked)]
pub(super) fn choose_and_sort<F: Float>(
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
    #[comptime] block_rows: usize,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let mut of_row = Shared::<[u32]>::new_slice(SHARED_ROWS);
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
    let mut token = warp;
    while token < count {
        let (expert, weight) = choose::<F>(logits, &correction, token, lane, factor, router);
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
    sync_cube();

    if warp < sorters {
        for run in 0..runs {
            let row = (warp * runs + run) * 32 + lane;
            let (expert, lanes) = expert_of(row, rows, experts, &of_row);
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
            let (expert, lanes) = expert_of(row, rows, experts, &of_row);
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
