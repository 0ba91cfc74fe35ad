//! Marlin: W4A16 on tensor cores, for NVIDIA cards from compute capability 8.0 on.
//!
//! Supported: any M, N and K; groups of 32, 64, 128 or a whole column; symmetric or with zero points; a bias; activations, scales and output
//! all in f16 or all in bf16. Products accumulate in f32, within a block and across blocks. The same inputs give the same bits.
//!
//! Refused, on the host and with the numbers in the message: buffers of another length than the problem's, f32 activations, scales in another
//! dtype than the activations, and operands of 2^32 elements or more. Act-order and K that is no multiple of 8 take activations that
//! [`repack::arrange`](crate::repack::arrange) has put in order.
//!
//! # How it works
//!
//! After the Marlin paper (Frantar et al., 2024, section 3.4), with what a card of more bandwidth asks for.
//!
//! **Work.** The output is cut into tiles, a tile into steps along K; every block gets an equal run of steps, a *stripe*, across tiles
//! (`stripe.rs`). Where a tile has parts of several blocks, all but the last leave their sums in a workspace and the last adds them
//! (`epilogue.rs`). Few sums travel each with a mark, many under a flag (`exchange.rs`).
//!
//! **A step.** Each warp owns one chunk of the weight, 64 rows of K by 64 columns: it copies it with `cp.async` past the first-level cache and
//! multiplies it, and since a lane copies the very words it multiplies, only the activations need the block's barrier. They lie in shared
//! memory with runs of eight values swizzled by XOR, for `ldmatrix`. As many stages are in flight as shared memory holds (`copy.rs`).
//!
//! **A product.** The transpose is computed, W^T X^T: fragment A of `mma.m16n8k16` is 16 columns of the weight, fragment B eight rows of
//! activations, so that one row wastes seven rows of a tensor core and not fifteen. A word of the tile layout is an A fragment: `lop3` puts
//! nibbles into the mantissas of two halves, one half2 instruction takes the zero point off. With up to 16 rows and more than one group even
//! that is too much: there the masked nibbles are multiplied as the small numbers that they are in f16, and one product more, with ones in
//! place of weights, sums the activations, times which a group's zero points leave its sums in f32 (`fragment.rs`).
//!
//! **Warpgroups.** On compute capability 9.0, `wgmma` takes a word of each of four warps and reads the activations from shared memory itself
//! (`warpgroup.rs`). It runs while the next words are made fragments, and across steps, so the stages of the last two are in use. The copy
//! engine fills the stages, for one producer warp where there are registers for it, and nobody waits for a whole block (`pipeline.rs`).
//!
//! **Scales.** For up to 32 rows, by `wgmma` up to 16, a group's products are summed apart and scaled once in f32; for more, the weights are
//! scaled in half2. With one group, sums are scaled when they are written. `wgmma`'s sums are out of reach until it is done, so with groups of
//! 128 a warp takes a group's two chunks one after the other.
//!
//! **Which tile.** `plan.rs` estimates the time of each from bytes, instructions and parts, and takes the fastest: no trial at run time.

mod config;
mod copy;
#[cfg(feature = "cuda")]
mod digest;
mod epilogue;
mod exchange;
#[allow(clippy::manual_is_multiple_of, reason = "beside `j / 2`, `j % 2` says where a column's zero point is")]
mod fragment;
pub mod gemv;
mod kernel;
mod launch;
mod pipeline;
mod plan;
#[cfg(feature = "cuda")]
mod source;
mod stripe;
mod tiles;
#[allow(clippy::collapsible_if, reason = "of two conditions the outer is known when a kernel is made, the inner when it runs")]
mod warpgroup;

pub use config::{Config, Product, Tile};
#[cfg(feature = "cuda")]
pub use digest::digest;
pub use launch::{MatmulArgs, WeightArgs, Workspace, layout, matmul, row_length};
pub use plan::{Card, Launch, MIN_CAPABILITY, launches, plan};
#[cfg(feature = "cuda")]
pub use source::{Source, buffer, cuda_text, properties, settings, shared_limit, source, target};
pub use tiles::configs;
