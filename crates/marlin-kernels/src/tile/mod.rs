//! The shared parts of the Marlin kernels, W4A16 and W8A16 on tensor cores, for NVIDIA cards from
//! compute capability 8.0 on: [`mma_sync`](crate::matmul::mma_sync) and
//! [`wgmma`](crate::matmul::wgmma) are two kernels built on them.
//!
//! Supported: any M, N and K; groups of 32, 64, 128 or a whole column; symmetric or with zero
//! points; a bias; activations, scales and output all in f16 or all in bf16. Products accumulate in
//! f32, within a block and across blocks. The same inputs give the same bits.
//!
//! Refused, on the host and with the numbers in the message: buffers of another length than the
//! problem's, f32 activations, scales in another dtype than the activations, and operands of 2^32
//! elements or more. With act-order, or a K that is no multiple of 8, the activations must come
//! from [`repack::arrange`](crate::repack::arrange): [`launch`](crate::launch) calls it.
//!
//! # How it works
//!
//! After the Marlin paper (Frantar et al., 2024, section 3.4), with changes for cards of more
//! bandwidth.
//!
//! **Work.** The output is divided into tiles, a tile into steps along K; every block gets an equal
//! run of steps, a *stripe*, across tiles (`stripe.rs`). Of many tiles of many rows only the last
//! are divided so; the others are visited whole, in waves. Or a cluster of blocks has a tile, and
//! splits its K (`cluster.rs`). If several blocks with stripes compute parts of a tile (split-K),
//! all but the last write their sums to a workspace and the last adds them (`epilogue.rs`). A few
//! sums are passed each with a mark, many under one flag (`exchange.rs`).
//!
//! **A product.** The transpose is computed, W^T X^T: fragment A of `mma.m16n8k16` is 16 columns of
//! the weight, fragment B eight rows of activations, so that one row wastes seven rows of a tensor
//! core and not fifteen. A word of the tile layout is an A fragment: `lop3` puts nibbles into the
//! mantissas of two halves, one half2 instruction subtracts the zero point. With up to 16 rows and
//! more than one group even that is too much: there the masked nibbles are multiplied as the
//! subnormal numbers that they are in f16, and one further product, with ones in place of weights,
//! sums the activations; that sum times a group's zero points is subtracted from its sums in f32
//! (`fragment.rs`). Of 8 bits the words of two tiles are an A fragment, and `prmt` puts a byte
//! below the upper half of 1024 in f16, or below 2^23 in f32 on the way to bf16.
//!
//! **Scales.** For up to 32 rows, by `wgmma` up to 16, a group's products are summed separately and
//! scaled once in f32; for more, the weights are scaled in half2. With one group, sums are scaled
//! when they are written.
//!
//! **Which tile.** [`plan`] estimates the time of each from bytes, instructions and split tiles,
//! and takes the fastest (`cost.rs`): there is no autotuning at run time.
//!
//! | file | holds |
//! |---|---|
//! | `config`, `candidates` | the shape of a block's work; the available tiles |
//! | `cost` | the choice among them |
//! | `lengths` | a problem as the kernels see it |
//! | `stripe` | the work of a block |
//! | `cluster` | the sums of the blocks of a cluster |
//! | `fragment` | from packed words to fragments |
//! | `outputs`, `exchange`, `epilogue`, `workspace` | from the warps' sums to the output |
//! | `operands` | the checks of a launch |

pub(crate) mod candidates;
pub(crate) mod cluster;
pub(crate) mod config;
pub(crate) mod cost;
pub(crate) mod epilogue;
mod exchange;
#[allow(
    clippy::manual_is_multiple_of,
    reason = "beside `j / 2`, `j % 2` says where a column's zero point is"
)]
pub(crate) mod fragment;
pub(crate) mod lengths;
pub(crate) mod operands;
pub(crate) mod outputs;
pub(crate) mod stripe;
pub(crate) mod workspace;

pub use candidates::configs;
pub use config::{Config, Product, Tile};
pub use cost::{Launch, launches, plan};
pub use operands::row_length;
