//! The operations of a decode step other than its quantised matmuls: attention over a KV cache,
//! norms, rotary embedding, SwiGLU, the token embedding, the lm_head and sampling.
//!
//! One step runs a model on one token of each of several sequences. The state of a sequence is a
//! [`SequenceState`]; the rows are a tensor [rows, [`SequenceState::WORDS`]] on the device, and
//! [`sample`] writes the chosen token and the next position to it, so that the next step needs
//! nothing from the host. On CUDA a step can be recorded with [`burn::tensor::capture`] and
//! replayed: every tensor that a function takes by `&mut` is written in place and keeps its memory.
//!
//! | module | contents |
//! |---|---|
//! | [`ahead`] | compilation of a pass's kernels before the pass, on all cores |
//! | [`kernels`] | the kernels in CubeCL, without Burn |
//! | `host` | the same operations in Rust, for Burn's Flex backend |
//! | [`ops`] | the kernels and `host` as operations of a Burn backend extension |
//! | `portable` | the same operations in terms of Burn's operations, for every backend |
//! | `cache` | the KV cache of a layer |
//! | `rows` | writes and reads of a step's rows by the host |
//!
//! Without a feature for one of CubeCL's runtimes, [`kernels`] has only the types that describe an
//! operation, and the crate does not depend on CubeCL's compiler.
//!
//! # Features
#![doc = document_features::document_features!()]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(feature = "cubecl-runtime"),
    allow(dead_code, reason = "kernels in CubeCL use it")
)]

pub mod ahead;
mod attention_parts;
mod cache;
mod device;
mod error;
mod functions;
#[cfg(feature = "flex")]
mod host;
pub mod kernels;
mod linear;
pub mod ops;
mod portable;
mod rows;

pub use attention_parts::AttentionParts;
pub use cache::{
    CacheFormat, CacheShape, LayerCache, PageTable, Pages, cache, read_cache, write_cache,
};
pub use device::{MAX_PASS_ROWS, has_flash_attention, has_kernels, takes_prompts};
pub use error::DecodeError;
pub use functions::{
    add_rms_norm, apply, attention, embed, log_likelihoods, logprobs, matmul, prompt_attention,
    rms_norm, sample,
};
pub use kernels::flash::{TILE_WORDS, most_tiles, tiles};
pub use kernels::sample::{LOGPROB_WORDS, MAX_LOGPROBS, SlotTokens, TokenTable, bitmap};
pub use kernels::{SequenceState, SequenceStatus};
pub use linear::{linear, norm_float_linear, norm_linear};
pub use portable::rotate;
pub use rows::{
    LogprobsRead, RowsRead, TokenLogprobs, read_rows, start_reading, start_reading_logprobs, words,
    write_rows, write_words,
};
