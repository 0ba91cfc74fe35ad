//! Attention of prompts on tensor cores: FlashAttention (arXiv 2205.14135, 2307.08691) over the KV
//! cache, for batches of prompts of any lengths.
//!
//! [`rope_cache`](super::rope_cache) provides normalised and rotated queries, and writes keys and
//! values to the cache.
//!
//! Supported are NVIDIA cards from compute capability 8.0 on; f16 and bf16; any head_dim that is a
//! multiple of 16 up to 256; any number of query heads per key head (GQA); a sliding window; and a
//! cache of pages ([`CacheShape`](crate::CacheShape)), which are copied page by page.
//! Products and softmax are in f32; the exponentials are rounded to the dtype before they are
//! multiplied by the values. The same inputs give the same bits. [`takes`] tells whether a device
//! and a shape are supported; [`attention`](super::attention) computes the others.
//!
//! # How it works
//!
//! **Tiles.** The tokens of a launch are one batch, prompt after prompt. The host divides each
//! prompt into tiles of up to 128 tokens ([`tiles`]); the tiles that attend to the most positions
//! come first. The table of tiles is in device memory, so a launch can be recorded in a graph.
//! Scores stay in registers: the accumulators of one product, rounded and in pairs, are the
//! fragments A of the next product (`softmax.rs`).
//!
//! **Compute capability 9.0** (`wgmma.rs`). A block computes a tile for one query head. Two
//! warpgroups have 64 queries each. One thread of a third warpgroup starts the copies of queries,
//! keys and values by the copy engine. It copies up to two stages ahead, of 128 positions each, or
//! 64 if head_dim is above 128. The products of the next keys are issued before the products of the
//! current values. The softmax of a warpgroup therefore overlaps with its own products, and with
//! those of the other warpgroup.
//!
//! ```text
//! products    S0 = Q K0^T |          S1 = Q K1^T | O += P0 V0 | S2 = Q K2^T | O += P1 V1 | ..
//! softmax                 | P0 of S0 |           | P1 of S1   |             | P2 of S2   | ..
//! ```
//!
//! **Other cards** (`mma_sync.rs`). A block computes half a tile for one query head. Each of four
//! warps has 16 queries, as fragments A of `mma.m16n8k16`: in registers if head_dim is at most 64,
//! otherwise loaded from shared memory for every product. Keys and values are copied to shared
//! memory 64 positions at a time. The next keys are copied while values are multiplied, and the
//! next values while keys are multiplied.
//!
//! ```text
//! keys    | copy 0 |      wait | S = Q K^T | copy 1          ...     | wait
//! values  | copy 0 |                       softmax | wait | O += P V | copy 1
//! ```
//!
//! Rows in shared memory are 16 bytes longer than a head, an odd number of 16 bytes, so the eight
//! rows that `ldmatrix` reads at a time are in different banks.

#[cfg(feature = "cubecl-runtime")]
mod config;
#[cfg(feature = "cubecl-runtime")]
mod launch;
#[cfg(feature = "cubecl-runtime")]
mod mma_sync;
#[cfg(feature = "cubecl-runtime")]
mod pipeline;
#[cfg(feature = "cubecl-runtime")]
mod softmax;
#[cfg(feature = "inspect")]
mod source;
mod tiles;
#[cfg(feature = "cubecl-runtime")]
mod wgmma;

#[cfg(feature = "inspect")]
pub(in crate::kernels) use config::FlashLengthsCompilationArg;
#[cfg(feature = "cubecl-runtime")]
pub(in crate::kernels) use config::{FlashLengths, FlashLengthsLaunch, TileRows};
#[cfg(feature = "cubecl-runtime")]
pub use launch::{FlashArgs, flash, takes};
#[cfg(feature = "inspect")]
pub use source::source;
pub use tiles::{TILE_ROWS, TILE_WORDS, most_tiles, tiles};
