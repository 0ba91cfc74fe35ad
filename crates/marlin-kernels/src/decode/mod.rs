//! A decode step outside its matmuls: one token for each of several sequences, on the device from token to token.
//!
//! A step is recorded once as a graph and replayed while sequences grow, so grids, buffers and scalars are fixed, and all that changes from step
//! to step is in the device's memory: a [`Row`] for each sequence.

pub mod attention;
mod row;

pub use row::{Row, RowState};
