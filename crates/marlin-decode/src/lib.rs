//! A decode step outside its matmuls: attention over a KV cache, norms, rotary embedding, SwiGLU, the embedding, the head and sampling.
//!
//! One step takes the next token of each of several sequences through a model. The state of a sequence is a [`Row`]; the rows are a
//! tensor [rows, [`Row::WORDS`]] on the device, and [`sample`] writes the chosen token and the next position there, so that the next step
//! needs nothing from the host. On CUDA a step can be recorded with [`burn::tensor::capture`] and replayed: every tensor that a function takes
//! by `&mut` is written in place and keeps its memory.
//!
//! | module | holds |
//! |---|---|
//! | [`kernels`] | the kernels in CubeCL, without Burn |
//! | `host` | the same in Rust, for Burn's Flex backend |
//! | [`ops`] | the operations as a Burn backend extension |

mod error;
mod functions;
#[cfg(feature = "flex")]
mod host;
pub mod kernels;
pub mod ops;

pub use error::DecodeError;
pub use functions::{
    AttentionParts, LayerCache, RowsRead, add_rms_norm, attention, cache, embed, has_kernels, head, matmul, norm_linear, read_rows,
    rms_norm, rotate, sample, silu_mul, start_reading, words, write_cache, write_rows, write_words,
};
pub use kernels::sample::bitmap;
pub use kernels::{Row, RowState};
