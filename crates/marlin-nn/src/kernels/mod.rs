//! The kernels of a decode step, and of prompts, other than the matmuls. A step computes one token
//! of each of several sequences.
//!
//! A step is recorded once as a graph and replayed while sequences grow. So grids, buffers and
//! scalars are fixed, and everything that changes from step to step is in device memory: a
//! [`SequenceState`] per sequence.

pub mod attention;
mod embed;
pub mod flash;
mod glu;
mod likelihood;
mod norm;
mod rope_cache;
pub mod sample;
mod sequence_state;
mod shape;
#[cfg(feature = "inspect")]
mod source;

pub use crate::cache::CacheShape;
pub use crate::cache::write::write_cache;
pub use embed::{EmbedArgs, embed};
pub use glu::{SiluMulArgs, silu_mul};
pub use likelihood::{LikelihoodArgs, log_likelihoods};
pub use norm::{RmsNormArgs, rms_norm};
pub use rope_cache::{RopeCacheArgs, rope_cache};
pub use sequence_state::{SequenceState, SequenceStatus};
pub use shape::{RowsShape, lacks};
#[cfg(feature = "inspect")]
pub use source::{rms_norm_source, silu_mul_source};
