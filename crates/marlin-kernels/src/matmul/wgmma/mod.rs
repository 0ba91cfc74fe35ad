//! The Marlin kernel with `wgmma`, for compute capability 9.0, with which the four warps of a
//! warpgroup multiply together.
//!
//! `wgmma` takes a fragment of the weight from each of the four warps and reads the activations
//! directly from shared memory. It is asynchronous: it runs while the next words are converted to
//! fragments, and across steps, so the stages of the last two steps are in use. The copy engine
//! fills the stages; a producer warp starts the copies if there are enough registers for one. No
//! warp waits for the whole block. The accumulators cannot be read until `wgmma` is done, so with
//! groups of 128 a warp multiplies a group's two chunks one after the other.
//!
//! For many rows of activations a tile has 128 rows. Each converted weight is then multiplied with
//! twice as many rows as in tiles of 64, and while one warpgroup converts, the other multiplies. A
//! warp has 32 columns, half a chunk. Whole tiles are computed in waves, and only the last tiles
//! are divided into stripes (`tile/stripe.rs`). Llama 2 7B's qkv projection at M = 4096 on an H200,
//! in TFLOP/s: 514 in tiles of 64 rows, 597 in tiles of 128, 746 with the producer's registers
//! given to the consumers, and with waves.
//!
//! Rows of experts have tiles of [`BLOCK_ROWS`](crate::tile::BLOCK_ROWS) rows. With 24, 40 and 80,
//! most experts have one tile along M although random routing gives some of them more rows than the
//! mean. Of gates and ups, the last tile along N may have fewer than the others (gpt-oss's 2880).
//!
//! If there are few tiles, each is computed by a cluster of blocks, which split its K
//! (`tile/cluster.rs`). With 64 rows on an H100, the overhead of a launch beyond its products is
//! then 4 us; with stripes, whose sums are passed through global memory, it is 10 us.
//!
//! A 2:4 weight is multiplied by `wgmma.sp`, from 16 rows of activations on. The table gives the
//! throughput of the products alone, in a loop on an H200, in TFLOP/s of the dense shape:
//!
//! | rows of activations | 16 | 32 | 64 | 128 | 256 | with `mma.sync` |
//! |---|---:|---:|---:|---:|---:|---:|
//! | `wgmma` | 530 | 861 | 966 | 878 | 865 | 638 |
//! | `wgmma.sp` | 839 | 1590 | 1845 | 1741 | 1727 | 960, `mma.sp` |
//!
//! With activations in e4m3 (W8A8), a step has 128 rows of K, 128 bytes of a row of activations,
//! and the sums are added in f32 after each step (`fp8.rs`). Llama 2 7B's gate and up projection at
//! M = 4096 on an H200 took 615 us with the rounding of the activations, 965 us in int4, and 551 us
//! in PyTorch's `_scaled_mm` with scales of rows, without the rounding, in one run.
//!
//! | file | holds |
//! |---|---|
//! | `kernel` | the kernel, from the first copy to the epilogue |
//! | `pipeline` | stages and barriers |
//! | `producer` | bulk copies into a stage |
//! | `warpgroup` | the products of a step |
//! | `fp8` | the products of a step in e4m3 |

#[allow(
    clippy::collapsible_if,
    reason = "of two conditions the outer is known when a kernel is made, the inner when it runs"
)]
mod fp8;
mod kernel;
mod pipeline;
mod producer;
#[cfg(feature = "inspect")]
mod source;
#[allow(
    clippy::collapsible_if,
    reason = "of two conditions the outer is known when a kernel is made, the inner when it runs"
)]
mod warpgroup;

pub(crate) use kernel::matmul;
#[cfg(feature = "inspect")]
pub use source::source;
