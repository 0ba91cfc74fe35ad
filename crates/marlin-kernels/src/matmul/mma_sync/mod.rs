//! The Marlin kernel with `mma.sync`, with which each warp multiplies independently. It runs on
//! every card from compute capability 8.0 on.
//!
//! Each warp owns one chunk of the weight in a step, 64 stored rows of K by 64 columns: it copies
//! the chunk with `cp.async`, bypassing the first-level cache, and multiplies it. A lane copies
//! exactly the words that it multiplies. Activations are shared by a team, the warps side by side
//! along N. The warps of a team copy the activations for their rows of K together and wait for each
//! other; teams synchronise with each other only at the end of a tile. In shared memory the runs of
//! eight activations are swizzled by XOR, for `ldmatrix`. As many stages are in flight as fit in
//! shared memory.
//!
//! | file | holds |
//! |---|---|
//! | `kernel` | the kernel, from the first copy to the epilogue |
//! | `copy` | the `cp.async` pipeline |
//! | `copies` | the copies of one step |
//! | `multiply` | the products of a chunk |
//! | `multiply_fp8` | the products of a chunk of e4m3 by e4m3 |
//! | `multiply_sparse` | the products of a chunk of a 2:4 weight, by `mma.sp.sync` |

#[allow(
    clippy::collapsible_if,
    reason = "of two conditions the outer is known when a kernel is made, the inner when it runs"
)]
mod copies;
mod copy;
mod kernel;
mod multiply;
mod multiply_fp8;
mod multiply_sparse;
#[cfg(feature = "inspect")]
mod source;

pub(crate) use kernel::matmul;
#[cfg(feature = "inspect")]
pub use source::source;
