//! The kernels of a decode step outside its matmuls: one token for each of several sequences, on the device from token to token.
//!
//! A step is recorded once as a graph and replayed while sequences grow, so grids, buffers and scalars are fixed, and all that changes from step
//! to step is in the device's memory: a [`Row`] for each sequence.

pub mod attention;
mod cache;
#[cfg(feature = "inspect")]
mod digest;
mod embed;
mod glu;
mod norm;
mod row;
pub mod sample;
mod shape;
#[cfg(feature = "inspect")]
mod source;

pub use cache::{CacheShape, write_cache};
#[cfg(feature = "inspect")]
pub use digest::digest;
pub use embed::{EmbedArgs, embed};
pub use glu::{SiluMulArgs, silu_mul};
pub use norm::{RmsNormArgs, rms_norm};
pub use row::{Row, RowState};
pub use shape::{RowsShape, lacks};
#[cfg(feature = "inspect")]
pub use source::{rms_norm_source, silu_mul_source};
