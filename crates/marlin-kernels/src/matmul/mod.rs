//! The matmul routines, one folder each.

pub mod head;
pub mod host;
pub mod mma_sync;
pub mod norm_gemv;
pub mod portable;
pub mod wgmma;
