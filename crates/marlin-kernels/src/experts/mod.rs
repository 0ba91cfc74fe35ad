//! Mixtures of experts: a router chooses experts for each token, and the token's row of activations
//! is multiplied by the matrices of these experts alone.
//!
//! A layer of many rows on NVIDIA cards sorts them by expert and multiplies tiles of them. Its
//! kernels, in order:
//!
//! | kernel | from | to |
//! |---|---|---|
//! | `route` | logits of the router [tokens, experts] | a `Routing`: the experts of each token, their weights, and the rows of each expert |
//! | `multiply`, gathered | activations [tokens, K] | [rows, N] in the order of experts; gates and ups with SwiGLU |
//! | `multiply`, sorted | the output of the one before | [rows, K] in the order of experts |
//! | `combine` | [rows, K] in the order of experts | the weighted sums of each token's experts [tokens, K] |
//!
//! `layer` launches all of them. Before a product, `gather` permutes rows for weights with
//! act-order, and copies rows of tokens to the order of experts for tiles of `wgmma`.
//!
//! A layer of few rows on cards with clusters multiplies each row by itself, in two launches that
//! choose the experts and add the outputs, too
//! ([`matmul::gemv::experts`](crate::matmul::gemv::experts)). `plan` decides between both.
//!
//! A row is one token at one of its experts, so there are tokens x `top_k` rows. The order of
//! experts is that of the experts' numbers and, within an expert, that of the tokens. The numbers
//! of rows of each expert stay on the device: the host never waits for a routing, and a recorded
//! pass is valid for every routing.
//!
//! The product of few rows is [`mma_sync`](crate::matmul::mma_sync) with [`RowOrder::Gathered`] or
//! [`RowOrder::Sorted`], that of many on compute capability 9.0 [`wgmma`](crate::matmul::wgmma)
//! with sorted rows. A tile has rows of one expert. A block's stripe of work is computed on the
//! device from the number of blocks of rows in the routing.
//!
//! [`host`] has the same on the CPU.
//!
//! [`RowOrder::Gathered`]: crate::tile::RowOrder::Gathered
//! [`RowOrder::Sorted`]: crate::tile::RowOrder::Sorted

#[cfg(feature = "cubecl-runtime")]
mod combine;
#[cfg(feature = "cubecl-runtime")]
mod gather;
pub mod host;
#[cfg(feature = "cubecl-runtime")]
mod layer;
#[cfg(feature = "cubecl-runtime")]
mod multiply;
#[cfg(feature = "cubecl-runtime")]
mod plan;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod route;
mod router;
#[cfg(feature = "inspect")]
mod source;

#[cfg(feature = "cubecl-runtime")]
pub use combine::combine;
#[cfg(feature = "cubecl-runtime")]
pub use gather::{GatherOperands, gather};
#[cfg(feature = "cubecl-runtime")]
pub use layer::{LayerOperands, layer};
#[cfg(feature = "cubecl-runtime")]
pub use multiply::{ExpertOperands, multiply};
#[cfg(feature = "cubecl-runtime")]
pub use plan::{
    LayerPlan, RowPlan, TilePlan, expected_row_blocks, launches, plan, row_plan, tile_plan,
};
#[cfg(feature = "cubecl-runtime")]
pub use route::RouteKernels;
#[cfg(feature = "cubecl-runtime")]
pub use route::{RouteOperands, Routing, route};
pub use router::{MAX_TOP_K, Router, RouterScores};
#[cfg(feature = "inspect")]
pub use source::{combine_source, gather_source, route_sources};

/// The maximum number of blocks of a launch along its second dimension, on CUDA.
#[cfg(feature = "cubecl-runtime")]
const MAX_BLOCKS: usize = 65_535;

/// Returns the maximum number of tokens of a layer whose widest rows have `width` features.
#[cfg(feature = "cubecl-runtime")]
pub fn most_tokens(router: &Router, width: usize) -> usize {
    // A block has at least eight rows, and each expert may have one that is not full.
    let rows = 8 * (MAX_BLOCKS - router::MAX_EXPERTS);
    let by_blocks = (rows / router.top_k.max(1)).min(MAX_BLOCKS);
    let by_elements = crate::problem::MAX_ELEMENTS / (width.max(1) * router.top_k.max(1));
    by_blocks.min(by_elements).max(1)
}
