//! The matmul routines, each in a folder.

pub mod gemv;
pub mod head;
pub mod host;
pub mod mma_sync;
pub mod portable;
pub mod wgmma;
