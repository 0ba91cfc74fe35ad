//! Conversion between the plain layout and the tile layout, on the device.
//!
//! The weight of a checkpoint is loaded in
//! [`WeightLayout::Plain`](marlin_format::WeightLayout::Plain), GPTQ's order of rows. These kernels
//! convert its words, metadata, scales and zero points to the order that the [tile
//! kernels](crate::tile) read, including padding, and back. [`arrange`] reorders the columns of
//! activations to the order of the stored rows. The kernels run on every CubeCL runtime.
//!
//! [`expand`] converts the kept values of a 2:4 weight to a dense weight, for kernels that do not
//! read metadata.
//!
//! Each unit computes one element of the output, by the inverse of the layouts' index functions.
//! Tests compare the kernels with these functions.

mod kernel;
mod launch;

pub(crate) use launch::to_portable;
pub use launch::{arrange, expand, tensor};
