//! Formats of 4-bit and 8-bit weights on the host: groups, packing, the Marlin tile layout,
//! quantisation and checkpoints. The crate depends neither on Burn nor on a GPU.
//!
//! Every conversion goes through one form, [`PlainWeight`]. Files are read into a [`PlainWeight`]
//! ([`checkpoint`]), f32 weights are quantised into one ([`quantize_rtn`]), and device layouts are
//! packed from one ([`layout`]).
//!
//! Throughout the crate, K is the number of input features, N is the number of output features, and
//! G is the number of groups along K. A weight has the shape `[K, N]`, the transpose of PyTorch's
//! `[N, K]`.
//!
//! ```
//! use marlin_format::{GroupSize, QuantSpec, quantize_rtn};
//!
//! let (k, n) = (64, 3);
//! let weight: Vec<f32> = (0..k * n).map(|i| (i as f32 * 0.37).sin()).collect();
//! let quantized = quantize_rtn(&weight, k, n, &QuantSpec::int4(GroupSize::G32))?;
//! let worst = weight.iter().zip(quantized.dequantize()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
//! assert!(worst < 0.07);
//! # Ok::<(), marlin_format::FormatError>(())
//! ```

#[cfg(target_endian = "big")]
compile_error!(
    "packed weights are little-endian, in files and on devices; this crate does not convert them on a big-endian host"
);

pub mod checkpoint;
pub mod layout;

mod error;
mod fold;
mod memory;
mod text;
mod weight;

pub use error::FormatError;
pub use fold::{LayerRun, fold_layers};
pub use memory::{available_memory, memory_short_of};
pub use text::{excerpt, with_causes, without_control};
pub use weight::{
    GroupSize, JoinError, PlainParts, PlainWeight, QuantSpec, ScaleDtype, ScaleSpec, Scales,
    Sparsity, TensorDescriptor, TensorDtype, WeightDescriptor, WeightFormat, WeightLayout,
    WeightTensor, WeightTensors, WeightValue, ZeroPoint, check_two_four, expand_two_four,
    prune_two_four, quantize, quantize_rtn, quantize_two_four,
};
