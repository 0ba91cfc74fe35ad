//! The shared parts of the Marlin kernels, weights of 4 and 8 bits on tensor cores, for NVIDIA
//! cards from compute capability 8.0 on. Two kernels use them:
//! [`mma_sync`](crate::matmul::mma_sync) and [`wgmma`](crate::matmul::wgmma).
//!
//! Supported: any M, N and K; integers in groups of 32, 64, 128 or a whole column, symmetric or
//! with zero points; e2m1 in groups of 16 or 32, and e4m3 in groups of 128 or a whole column; a
//! bias; activations, scales and output all in f16 or all in bf16. Products accumulate in f32,
//! within a block and across blocks. The same inputs give the same bits. Where a weight of e4m3
//! allows it and K is a multiple of 128, [`Product::Fp8MmaSync`] and [`Product::Fp8Wgmma`] take
//! activations that are rounded to e4m3 ([`fp8`](crate::fp8)).
//!
//! Refused, on the host and with the numbers in the message: buffers whose length does not fit the
//! problem, f32 activations, scales in another dtype than the activations, and operands of 2^32
//! elements or more. With act-order, or a K that is not a multiple of 8, the activations must come
//! from [`repack::arrange`](crate::repack::arrange), which [`launch`](crate::launch) calls.
//!
//! # How it works
//!
//! The design follows the Marlin paper (Frantar et al., 2024, section 3.4), with changes for cards
//! with more bandwidth.
//!
//! **Work.** The output is divided into tiles, and a tile into steps along K. Every block gets an
//! equal run of steps, a *stripe*, which may extend across tiles (`stripe.rs`). If there are many
//! tiles of many rows, only the last tiles are divided into stripes, and the other tiles are
//! computed whole, in waves. Alternatively, a cluster of blocks computes a tile and splits its K
//! (`cluster.rs`). If several blocks with stripes compute parts of a tile (split-K), all but the
//! last write their sums to a workspace, and the last adds them (`epilogue.rs`). If a thread has
//! few sums, each sum is stored with a mark; if it has many, they are stored under one flag
//! (`exchange.rs`).
//!
//! **A product.** The transpose is computed, W^T X^T: fragment A of `mma.m16n8k16` is 16 columns of
//! the weight, and fragment B is eight rows of activations. One row of activations therefore wastes
//! seven rows of a tensor core, not fifteen. A word of the tile layout is an A fragment: `lop3`
//! puts nibbles into the mantissas of two halves, and one half2 instruction subtracts the zero
//! point.
//!
//! With up to 16 rows and more than one group, even this takes too many instructions for a dense
//! 4-bit weight. The masked nibbles are then multiplied as the subnormal numbers that they are in
//! f16. One further product, with ones in place of weights, sums the activations. That sum times a
//! group's zero points is subtracted from the group's sums in f32 (`fragment.rs`).
//!
//! With 8 bits, the words of two tiles are an A fragment. `prmt` puts a byte below the upper half
//! of 1024 in f16, or below 2^23 in f32 for the conversion to bf16.
//!
//! **Scales.** A group's products are summed separately and scaled once in f32, for up to 32 rows
//! with `mma.sync` and, with dense 4-bit weights, up to 16 with `wgmma`; for up to 8 if a chunk has
//! several groups. Otherwise the weights are scaled in half2. With a single group, sums are scaled
//! when they are written.
//!
//! **Choice of a tile.** [`plan`] estimates the time of each tile from bytes, instructions and
//! split tiles, and chooses the fastest (`cost.rs`). There is no autotuning at run time.
//!
//! | file | holds |
//! |---|---|
//! | `shape`, `config`, `candidates`, `spills` | the division of a block's work; the configuration of a kernel; the available tiles, and those that the compiler cannot fit in registers |
//! | `cost` | the choice among them |
//! | `sizes` | the lengths of a problem, as arguments of the kernels |
//! | `stripe` | the work of a block |
//! | `rows` | the rows of activations of a tile, in order or by experts |
//! | `cluster` | the sums of the blocks of a cluster |
//! | `fragment`, `conversion` | from packed words to fragments; the conversion of their values |
//! | `outputs`, `exchange`, `epilogue`, `runs`, `workspace` | from the warps' sums to the output |
//! | `operands` | the checks of a launch |

pub(crate) mod candidates;
pub(crate) mod cluster;
pub(crate) mod config;
mod conversion;
pub(crate) mod cost;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod epilogue;
mod exchange;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod floats;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod fp8;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod fragment;
#[cfg(feature = "cubecl-runtime")]
#[allow(
    clippy::manual_is_multiple_of,
    reason = "beside `j / 2`, `j % 2` says where a column's zero point is"
)]
mod integers;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod operands;
pub(crate) mod outputs;
pub(crate) mod rows;
#[cfg(feature = "cubecl-runtime")]
mod runs;
pub(crate) mod shape;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod sizes;
mod spills;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod stripe;
#[cfg(feature = "cubecl-runtime")]
pub(crate) mod workspace;

pub use candidates::configs;
pub use config::Config;
pub use cost::{Launch, launches, plan};
#[cfg(feature = "cubecl-runtime")]
pub(crate) use exchange::MAX_BLOCKS;
#[cfg(feature = "cubecl-runtime")]
pub use operands::row_length;
pub use rows::{BLOCK_ROWS, RowOrder};
pub use shape::{Product, Tile};
