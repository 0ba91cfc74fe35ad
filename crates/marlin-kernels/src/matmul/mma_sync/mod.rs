//! The Marlin kernel with `mma.sync`: each warp multiplies by itself. It runs on every card from
//! compute capability 8.0 on.
//!
//! Each warp owns one chunk of the weight in a step, 64 stored rows of K by 64 columns: it copies
//! it with `cp.async`, bypassing the first-level cache, and multiplies it. A lane copies the words
//! that it multiplies itself. Activations are shared by a team, the warps side by side along N,
//! which copy those of their rows of K together and wait for each other; teams meet only at the end
//! of a tile. They are in shared memory with runs of eight values swizzled by XOR, for `ldmatrix`.
//! As many stages are in flight as fit in shared memory.
//!
//! | file | holds |
//! |---|---|
//! | `kernel` | the kernel, from the first copy to the epilogue |
//! | `copy` | the `cp.async` pipeline |
//! | `multiply` | the products of a chunk |
//! | `multiply_sparse` | those of a chunk of a 2:4 weight, by `mma.sp.sync` |

#[allow(
    clippy::collapsible_if,
    reason = "of two conditions the outer is known when a kernel is made, the inner when it runs"
)]
mod copy;
mod kernel;
mod launch;
mod multiply;
mod multiply_sparse;
#[cfg(feature = "inspect")]
mod source;

pub(crate) use launch::launch;
#[cfg(feature = "inspect")]
pub use source::source;
