//! W4A16 and W8A16 without tensor cores, on any CubeCL runtime.
//!
//! Supported: any M, N and K; weights of 4 or 8 bits; groups of 32, 64, 128 or a whole column;
//! symmetric or with zero points; act-order; a bias; activations and output in f32, f16 or bf16,
//! scales in any of these dtypes. Products accumulate in f32, group by group.
//!
//! Refused, on the host and with the numbers in the message: buffers whose length does not fit the
//! problem, and operands of 2^32 elements or more, which 32-bit indices cannot address.
//!
//! The weight is in [`marlin_format::layout::PlainLayout`]: 32-bit words along N with eight rows of
//! K in a word (four with 8 bits), so that neighbouring units read neighbouring words.

mod kernel;
mod launch;

pub(crate) use launch::{dequantize, launch};
