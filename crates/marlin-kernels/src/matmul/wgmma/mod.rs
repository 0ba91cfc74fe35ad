//! The Marlin kernel with `wgmma`, for compute capability 9.0: the four warps of a warpgroup
//! multiply together.
//!
//! `wgmma` takes a word of each of four warps and reads the activations from shared memory itself.
//! It is asynchronous: it runs while the next words are converted to fragments, and across steps,
//! so the stages of the last two steps are in use. The copy engine fills the stages, started by a
//! producer warp if there are registers for one, and no warp waits for the whole block. The
//! accumulators cannot be read until `wgmma` is done, so with groups of 128 a warp multiplies a
//! group's two chunks one after the other.
//!
//! For many rows of activations a tile has 128 of them: a weight that is converted once is
//! multiplied with twice as many as in tiles of 64, and while one warpgroup converts, the other
//! multiplies. A warp has 32 columns, half a chunk. Tiles are visited in waves, whole, and only the
//! last are divided into stripes (`tile/stripe.rs`). Llama 2 7B's qkv projection at M = 4096 on an
//! H200, in TFLOP/s: 514 in tiles of 64 rows, 597 in tiles of 128, 746 with the producer's
//! registers and the waves.
//!
//! Where tiles are few, a cluster of blocks has one, and splits its K (`tile/cluster.rs`). What a
//! launch takes beside its products, with 64 rows on an H100, is then 4 us; with stripes, whose
//! sums go through global memory, it is 10.
//!
//! A 2:4 weight is multiplied by `wgmma.sp`, from 16 rows of activations on. Products alone, in a
//! loop on an H200, in TFLOP/s of the dense shape:
//!
//! | rows of activations | 16 | 32 | 64 | 128 | 256 | `mma.sync` of the same |
//! |---|---:|---:|---:|---:|---:|---:|
//! | `wgmma` | 530 | 861 | 966 | 878 | 865 | 638 |
//! | `wgmma.sp` | 839 | 1590 | 1845 | 1741 | 1727 | 960, `mma.sp` |
//!
//! | file | holds |
//! |---|---|
//! | `kernel` | the kernel, from the first copy to the epilogue |
//! | `pipeline` | stages and barriers |
//! | `producer` | bulk copies into a stage |
//! | `warpgroup` | the products of a step |

mod kernel;
mod launch;
mod pipeline;
mod producer;
#[cfg(feature = "inspect")]
mod source;
#[allow(
    clippy::collapsible_if,
    reason = "of two conditions the outer is known when a kernel is made, the inner when it runs"
)]
mod warpgroup;

pub(crate) use launch::launch;
#[cfg(feature = "inspect")]
pub use source::source;
