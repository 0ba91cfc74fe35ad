//! Conversion between the plain layout and the tile layout, on the device.
//!
//! A checkpoint's weight arrives in [`WeightLayout::Plain`](marlin_format::WeightLayout::Plain),
//! which is GPTQ's order of rows. These kernels put its words, scales and zero points in the order
//! that the [tile kernels](crate::tile) read, padding included, and back. [`arrange`] does the same
//! for activations: their columns in the order of the stored rows. They run on every CubeCL
//! runtime.
//!
//! [`expand`] makes all values of a 2:4 weight's kept ones, for the kernels that know no metadata.
//!
//! Each unit computes one element of the output, by the inverse of the layouts' index functions;
//! tests compare the two.

mod kernel;
mod launch;

pub(crate) use launch::to_portable;
pub use launch::{arrange, expand, tensor};
