//! The Marlin kernel with `wgmma`, for compute capability 9.0: the four warps of a warpgroup multiply together.
//!
//! `wgmma` takes a word of each of four warps and reads the activations from shared memory itself. It runs while the next words are made
//! fragments, and across steps, so the stages of the last two are in use. The copy engine fills the stages, for one producer warp where there
//! are registers for it, and nobody waits for a whole block. Its sums are out of reach until it is done, so with groups of 128 a warp takes a
//! group's two chunks one after the other.
//!
//! | file | holds |
//! |---|---|
//! | `kernel` | the kernel, from the first copy to the epilogue |
//! | `pipeline` | stages, barriers and bulk copies |
//! | `warpgroup` | the products of a step |

mod kernel;
mod launch;
mod pipeline;
#[cfg(feature = "inspect")]
mod source;
#[allow(clippy::collapsible_if, reason = "of two conditions the outer is known when a kernel is made, the inner when it runs")]
mod warpgroup;

pub(crate) use launch::launch;
#[cfg(feature = "inspect")]
pub use source::source;
