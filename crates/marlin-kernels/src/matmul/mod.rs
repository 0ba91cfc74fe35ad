//! The matmul routines, each in a folder.

pub mod gemv;
pub mod host;
pub mod lm_head;
pub mod mma_sync;
pub mod portable;
pub mod wgmma;
