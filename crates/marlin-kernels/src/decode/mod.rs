//! A decode step outside its matmuls: one token for each of several sequences, on the device from token to token.
//!
//! A step is recorded once as a graph and replayed while sequences grow, so grids, buffers and scalars are fixed, and all that changes from step
//! to step is in the device's memory: a [`Row`] for each sequence.

pub mod attention;
mod cache;
mod embed;
mod glu;
mod head;
mod norm;
mod planes;
mod row;
pub mod sample;
mod shape;
#[cfg(feature = "cuda")]
mod source;

pub use cache::{CacheShape, write_cache};
pub use embed::{EmbedArgs, embed};
pub use glu::{SiluMulArgs, silu_mul};
pub use head::{HeadArgs, head, max_head_rows};
pub use norm::{RmsNormArgs, rms_norm};
pub use row::{Row, RowState};
pub use shape::{RowsShape, lacks};
#[cfg(feature = "cuda")]
pub use source::{head_source, rms_norm_source, silu_mul_source};
