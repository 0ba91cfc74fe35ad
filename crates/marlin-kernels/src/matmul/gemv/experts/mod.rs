//! The kernels for few rows of experts: each row of a mixture's layer is multiplied by the matrix
//! of its expert as [`gemv`](super) multiplies one row, with the routing, SwiGLU and the weighted
//! sums of each token's experts in the same two launches.
//!
//! A layer of one token reads a few megabytes, which takes about as long as a launch. A separate
//! routing, and a kernel that adds the outputs of a token's experts, would each cost two to three
//! microseconds (`benches/records/moe-h200.json`).
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | gathered rows | x [tokens, K], logits [tokens, experts] | after SwiGLU [tokens, top_k, N] |
//! | summed rows | the output of the one before, logits | the weighted sums [tokens, N] |
//!
//! **Choice of experts.** Every warp computes the choice of its token by itself from the router's
//! logits, so nothing is exchanged, and rows are not sorted. A kernel with gathered rows waits for
//! the logits before it lets the next kernel start. Therefore the kernel with summed rows may read
//! the logits, and begin to load the weights of the experts, while gathered rows are multiplied.
//!
//! **Sums.** The blocks of a cluster compute 64 columns of all experts of a token. The first block
//! adds their sums, each multiplied by the router's weight, in the order of the experts' rank. The
//! outputs of single experts are not rounded to the activations' dtype.

mod config;
#[cfg(feature = "cubecl-runtime")]
mod kernel;
#[cfg(feature = "cubecl-runtime")]
mod launch;
#[cfg(feature = "cubecl-runtime")]
mod logits;
#[cfg(feature = "cubecl-runtime")]
mod output;
#[cfg(feature = "cubecl-runtime")]
mod plan;
#[cfg(feature = "inspect")]
mod source;

pub use config::{ExpertGemvConfig, ExpertRows};
#[cfg(feature = "cubecl-runtime")]
pub(crate) use launch::{ExpertGemvOperands, launch};
#[cfg(feature = "cubecl-runtime")]
pub use plan::{has_short_steps, plan};
#[cfg(feature = "inspect")]
pub use source::expert_source;
