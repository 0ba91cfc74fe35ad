//! Decode attention: one token of each sequence against the keys and values of those before it, over a cache of fixed size.
//!
//! One launch does what lies between the qkv projection and the output projection: RMSNorm of the heads of q and k where the model has it,
//! rotary embedding, the new key and value into the cache, softmax(q kᵀ / sqrt(head_dim)) v.
//!
//! Supported: f16, bf16 and f32; head_dim any multiple of 8 up to 512; any number of query heads a key head (GQA); rotary embedding of all or the
//! first features; a sliding window; rows of different slots and lengths. Sums are in f32. The same inputs give the same bits.
//!
//! Refused, on the host and with the numbers in the message: buffers of another length than the shape's, and shapes that make no sense
//! ([`AttentionShape`] says which). A row whose position or slot is outside of the cache is left alone, as an idle one is.
//!
//! # How it works
//!
//! **Work.** A block has a row, the query heads of one key head (at most eight) and a share of the sequence. How many shares there are at most, and
//! so the grid, follows from the shape and the device (`plan.rs`); how long a share is, and which blocks have none, from the row's position.
//!
//! **Lanes.** A key is read 16 bytes a lane: as many lanes as that takes, rounded up to a power of two, are a *team*. Each team goes through its
//! own positions with its own running maximum, sum and output (online softmax, arXiv 1805.02867), several positions at a time, and asks for the
//! next keys while it still adds values: no barrier in the loop. Lanes of a team add their parts of a product by shuffles. Where a device has no
//! planes a team is one unit.
//!
//! **The new token.** Its key and value take part from shared memory, as the first position of the last share's first team, and only that block
//! writes them to the cache: no block waits for another's write.
//!
//! **Shares.** Teams meet in shared memory. Where a sequence has several shares, each leaves its maximum, sum and output in a workspace, and the
//! last block to arrive, by a ticket, adds them in the order of the shares.

#[allow(clippy::collapsible_if, reason = "of two conditions the outer is known when a kernel is made, the inner when it runs")]
mod finish;
mod kernel;
mod launch;
mod plan;
mod shape;
mod softmax;
#[cfg(feature = "inspect")]
mod source;
mod stage;
mod team;

pub use launch::{AttentionArgs, attention};
pub use plan::{AttentionConfig, AttentionPlan, AttentionTarget};
pub use shape::AttentionShape;
#[cfg(feature = "inspect")]
pub use source::source;
