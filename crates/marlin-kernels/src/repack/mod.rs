//! Between the plain layout and the tile layout, on the device.
//!
//! A checkpoint's weight arrives in [`WeightLayout::Plain`](crate::WeightLayout::Plain), which is GPTQ's order of rows. These kernels put its
//! words, scales and zero points in the order that [`crate::marlin`] reads, padding included, and back. [`arrange`] does the same for activations:
//! their columns in the order of the stored rows. They run on every CubeCL runtime.
//!
//! Each unit makes one element of the output, from the layouts' index functions turned round.

mod kernel;
mod launch;

pub use launch::{arrange, scales, words, zero_points};
