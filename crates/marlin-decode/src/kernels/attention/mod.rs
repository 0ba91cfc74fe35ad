//! Decode attention: a token attends to the keys and values of its sequence's earlier positions, in
//! a cache of fixed size.
//!
//! One launch of a step computes everything between the qkv projection and the output projection:
//! RMSNorm of the heads of q and k if the model has it, rotary embedding, the write of the new key
//! and value to the cache, and softmax(q kᵀ / sqrt(head_dim)) v.
//!
//! Supported: f16, bf16 and f32; head_dim any multiple of 8 up to 512; any number of query heads
//! per key head (GQA); rotary embedding of all or the first features; a sliding window; rows of
//! different slots and lengths. Sums are in f32. The same inputs give the same bits.
//!
//! The host rejects buffers whose length does not match the shape, and invalid shapes
//! ([`AttentionShape::check`]), with the numbers in the message. A row whose position or slot is
//! outside the cache is skipped, as an idle one is.
//!
//! # How it works
//!
//! **Grid.** A block computes one row, the query heads of one key head (at most eight) and one
//! split of the sequence. The shape and the device determine the largest number of splits, and so
//! the grid (`plan.rs`). The row's position determines the length of a split, and which blocks have
//! no split and exit (`block.rs`).
//!
//! **Lane groups.** A lane reads 8 elements of a key at a time: 16 bytes in a 16-bit type. A *lane
//! group* has as many lanes as a key takes, rounded up to a power of two and at most a plane. Each
//! lane group processes its own positions with its own running maximum, sum and output (online
//! softmax, arXiv 1805.02867), several positions at a time, and loads the next keys while it still
//! adds values: the loop has no barrier. The lanes of a group add their parts of a dot product by
//! shuffles. On a device without planes a lane group is one unit.
//!
//! **The new token.** The block of the last split reads the token's key and value from shared
//! memory, as the first position of its first lane group, and only that block writes them to the
//! cache: no block waits for another's write.
//!
//! **Overlap.** In a step a block reads its row's state and loads its first keys and values before
//! it [waits](marlin_kernels::overlap) for the kernels before: nothing else in a step writes those,
//! and the state only the kernel that samples, at its end.
//!
//! **Prompts.** Their tokens can be rows, too, several of a sequence, after
//! [`rope_cache`](super::rope_cache()) has written all keys and values ([`AttentionPass`]). Every
//! row reads the keys before it by itself: this is for devices and dtypes that
//! [`flash`](super::flash) does not take.
//!
//! **Splits.** The sums of lane groups are added in shared memory. If a sequence has several
//! splits, each block writes its maximum, sum and output to a workspace, and the last block to
//! arrive, by a ticket, adds them in the order of the splits.

mod block;
mod config;
#[allow(
    clippy::collapsible_if,
    reason = "of two conditions the outer is known when a kernel is compiled, the inner when it runs"
)]
mod finish;
mod kernel;
mod lane_group;
mod launch;
mod plan;
mod shape;
mod softmax;
#[cfg(feature = "inspect")]
mod source;
mod stage;

pub use config::{AttentionConfig, AttentionTarget};
pub use launch::{AttentionArgs, attention};
pub use plan::AttentionPlan;
pub use shape::{AttentionPass, AttentionShape};
pub(super) use softmax::{MASKED, NONE};
#[cfg(feature = "inspect")]
pub use source::source;
