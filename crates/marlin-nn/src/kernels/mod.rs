//! The kernels of a decode step, and of prompts, other than the matmuls. A step computes one token
//! of each of several sequences.
//!
//! A step is recorded once as a graph and replayed while sequences grow. So grids, buffers and
//! scalars are fixed, and everything that changes from step to step is in device memory: a
//! [`SequenceState`] per sequence.

pub mod attention;
#[cfg(feature = "cubecl-runtime")]
mod e4m3_cache;
#[cfg(feature = "cubecl-runtime")]
mod embed;
pub mod flash;
#[cfg(feature = "cubecl-runtime")]
mod glu;
#[cfg(feature = "cubecl-runtime")]
mod likelihood;
#[cfg(feature = "cubecl-runtime")]
mod norm;
#[cfg(feature = "cubecl-runtime")]
mod rope_cache;
pub mod sample;
mod sequence_state;
#[cfg(feature = "cubecl-runtime")]
mod shape;
#[cfg(feature = "inspect")]
mod source;

pub use crate::cache::CacheShape;
#[cfg(feature = "cubecl-runtime")]
pub use crate::cache::write::write_cache;
#[cfg(feature = "cubecl-runtime")]
pub use e4m3_cache::{E4m3CacheArgs, store_codes, widen_codes};
#[cfg(feature = "cubecl-runtime")]
pub use embed::{EmbedArgs, embed};
#[cfg(feature = "cubecl-runtime")]
pub use glu::{GatedArgs, gated};
#[cfg(feature = "cubecl-runtime")]
pub use likelihood::{LikelihoodArgs, log_likelihoods};
#[cfg(feature = "cubecl-runtime")]
pub use norm::{RmsNormArgs, rms_norm};
#[cfg(feature = "cubecl-runtime")]
pub use rope_cache::{RopeCacheArgs, rope_cache};
pub use sequence_state::{SequenceState, SequenceStatus};
#[cfg(feature = "cubecl-runtime")]
pub use shape::{RowsShape, lacks};
#[cfg(feature = "inspect")]
pub use source::{e4m3_cache_sources, gated_source, rms_norm_source};
