//! The matmul routines, each in a folder.

pub mod few_columns;
#[cfg(feature = "cubecl-runtime")]
pub mod float;
pub mod float_gemv;
pub mod gemv;
pub mod host;
pub mod lm_head;
#[cfg(feature = "cubecl-runtime")]
pub mod mma_sync;
#[cfg(feature = "cubecl-runtime")]
pub mod portable;
#[cfg(feature = "cubecl-runtime")]
pub mod wgmma;
