//! Decode attention: a token attends to the keys and values of its sequence's earlier positions, in
//! a cache of fixed size.
//!
//! One launch of a step computes everything between the qkv projection and the output projection:
//! RMSNorm of the heads of q and k if the model has it, rotary embedding, the write of the new key
//! and value to the cache, and softmax(q kᵀ / sqrt(head_dim)) v.
//!
//! Supported are f16, bf16 and f32; any head_dim that is a multiple of 8 up to 512; any number of
//! query heads per key head (GQA); rotary embedding of all features or the first ones; a sliding
//! window; rows of different slots and lengths; and a cache of pages
//! ([`CacheShape`](crate::CacheShape)). Sums are in f32. The same inputs give the same
//! bits.
//!
//! The host rejects buffers whose length does not match the shape, and invalid shapes
//! ([`AttentionShape::check`]); the error message contains the numbers. A row whose position or
//! slot is outside the cache is skipped, like an idle row.
//!
//! # How it works
//!
//! **Grid.** A block computes one row, the query heads of one key head (at most eight) and one
//! split of the sequence. The shape and the device determine the maximum number of splits, and so
//! the grid (`plan.rs`). The row's position determines the length of a split, and which blocks have
//! no split and exit (`block.rs`).
//!
//! **Lane groups.** A lane reads 8 elements of a key at a time: 16 bytes in a 16-bit type. A *lane
//! group* has as many lanes as a key has such vectors, rounded up to a power of two, and at most a
//! plane. Each lane group processes its own positions with its own running maximum, sum and output
//! (online softmax, arXiv 1805.02867). It processes several positions at a time, and loads the next
//! keys while it adds the current values, so the loop has no barrier. The lanes of a group add
//! their parts of a dot product by shuffles. On a device without planes, a lane group is one unit.
//!
//! **The new token.** The block of the last split reads the token's key and value from shared
//! memory, as the first position of its first lane group. Only that block writes the key and value
//! to the cache, so no block waits for the write of another block.
//!
//! **Pages.** A lane group looks up the page of each of its positions before it loads a key, and
//! again before it loads a value; the entries of the page table that a block reads are in the first
//! level cache after the first tile. On an H200 a step of Llama 2 7B over pages of 64 positions
//! takes 1.430 ms, and 1.424 ms without pages; with 64 sequences 4.58 ms and 4.55 ms. Pages of 32
//! and 128 positions are up to 5 % slower for one sequence of 2048 positions.
//!
//! **Overlap.** In a step, a block reads its row's state and loads its first keys and values before
//! it [waits](marlin_kernels::pdl) for the previous kernels. No other kernel of a step writes these
//! keys and values, and only the sampling kernel, at the end of the step, writes the state.
//!
//! **Prompts.** The tokens of prompts can be rows, too, with several rows per sequence, after
//! [`rope_cache`](super::rope_cache()) has written all keys and values ([`AttentionPass`]). Every
//! row reads the preceding keys separately. This pass is for devices and dtypes that
//! [`flash`](super::flash) does not support.
//!
//! **Splits.** The sums of lane groups are added in shared memory. If a sequence has several
//! splits, each block writes its maximum, sum and output to a workspace. The last block to arrive,
//! which an arrival counter determines, adds them in the order of the splits.

#[cfg(feature = "cubecl-runtime")]
mod block;
#[cfg(feature = "cubecl-runtime")]
mod config;
#[cfg(feature = "cubecl-runtime")]
#[allow(
    clippy::collapsible_if,
    reason = "of two conditions the outer is known when a kernel is compiled, the inner when it runs"
)]
mod finish;
#[cfg(feature = "cubecl-runtime")]
mod kernel;
#[cfg(feature = "cubecl-runtime")]
mod lane_group;
#[cfg(feature = "cubecl-runtime")]
mod launch;
#[cfg(feature = "cubecl-runtime")]
mod plan;
mod shape;
#[cfg(feature = "cubecl-runtime")]
mod softmax;
#[cfg(feature = "inspect")]
mod source;
#[cfg(feature = "cubecl-runtime")]
mod stage;

#[cfg(feature = "cubecl-runtime")]
pub use config::{AttentionConfig, AttentionTarget};
#[cfg(feature = "cubecl-runtime")]
pub use launch::{AttentionArgs, attention};
#[cfg(feature = "cubecl-runtime")]
pub use plan::AttentionPlan;
pub use shape::{AttentionPass, AttentionShape};
#[cfg(feature = "cubecl-runtime")]
pub(super) use softmax::{MASKED, NONE};
#[cfg(feature = "inspect")]
pub use source::source;
