//! The routing of tokens to experts.
//!
//! | tokens | kernels |
//! |---|---|
//! | whose rows are at most 32 | `few`: a warp a token, and one warp that sorts |
//! | up to 32 | `sort`: one block whose warps choose the experts of a token each, and sort |
//! | more | `sort`: one kernel that chooses, with a warp a token, and one that sorts |

pub(crate) mod choose;
pub(super) mod few;
pub(super) mod sort;

use super::Router;
use crate::launch::second;
use crate::pdl;
use crate::problem::{MAX_ELEMENTS, expect_at_most, expect_length};
use crate::{ActivationDtype, KernelError, QuantProblem, Target};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use few::{choose_and_sort_few, is_few};
use sort::{choose_and_sort, choose_experts, sort_chosen};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The number of units of a cube that sorts.
pub(super) const UNITS: usize = 1024;
/// The number of units of a cube that only chooses experts.
pub(super) const CHOOSE_UNITS: usize = 128;
/// The number of threads of a warp.
pub(super) const WARP: usize = 32;

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

impl RouteOperands {
    /// Returns the same operands for another kernel.
    pub(crate) fn second(&self, problem: &QuantProblem) -> Result<Self, KernelError> {
        let correction = self.correction.as_ref();
        Ok(Self {
            logits: second(problem, "logits", &self.logits)?,
            dtype: self.dtype,
            correction: correction
                .map(|correction| second(problem, "correction", correction))
                .transpose()?,
            factor: self.factor,
        })
    }
}

/// Chooses the experts of `count` tokens, and sorts their rows by expert in blocks of at most
/// `block_rows` rows.
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
    expect_at_most(&problem, count.saturating_mul(router.experts), MAX_ELEMENTS)?;
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
    let halves = dtype != ActivationDtype::F32;
    let [experts, weights, places, tokens] = [
        &routing.experts,
        &routing.weights,
        &routing.places,
        &routing.tokens,
    ]
    .map(|table| routing.of_rows(table));
    // SAFETY: the lengths of the buffers were checked, or they were allocated, for `count` tokens.
    unsafe {
        match RouteKernels::of(&router, count) {
            RouteKernels::Few => choose_and_sort_few::launch_unchecked(
                client,
                CubeCount::new_single(),
                CubeDim::new_1d((count * WARP) as u32),
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
                halves,
                block_rows,
                uses_pdl,
                dtype.elem(),
            ),
            RouteKernels::One => choose_and_sort::launch_unchecked(
                client,
                CubeCount::new_single(),
                CubeDim::new_1d(UNITS as u32),
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
                halves,
                block_rows,
                uses_pdl,
                dtype.elem(),
            ),
            RouteKernels::Two => {
                choose_experts::launch_unchecked(
                    client,
                    CubeCount::new_1d(count.div_ceil(CHOOSE_UNITS / WARP) as u32),
                    CubeDim::new_1d(CHOOSE_UNITS as u32),
                    logits,
                    correction.into(),
                    experts,
                    weights,
                    count as u32,
                    factor,
                    router,
                    halves,
                    uses_pdl,
                    dtype.elem(),
                );
                pdl::make_edge_programmatic(client);
                sort_chosen::launch_unchecked(
                    client,
                    CubeCount::new_single(),
                    CubeDim::new_1d(UNITS as u32),
                    routing.of_rows(&routing.experts),
                    places,
                    tokens,
                    routing.blocks(),
                    count as u32,
                    router,
                    block_rows,
                    uses_pdl,
                );
            }
        }
    }
    pdl::make_edge_programmatic(client);
    Ok(routing)
}

/// The kernels that [`route`] launches for a number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteKernels {
    /// One block of a warp for each token, whose rows are the lanes of one warp.
    Few,
    /// One block, whose warps choose the experts of one token each.
    One,
    /// A kernel with a warp for each token, and one of one block that sorts.
    Two,
}

impl RouteKernels {
    /// Returns the kernels for a number of tokens.
    pub const fn of(router: &Router, tokens: usize) -> Self {
        if is_few(router, tokens) {
            Self::Few
        } else if tokens <= UNITS / WARP {
            Self::One
        } else {
            Self::Two
        }
    }
}
