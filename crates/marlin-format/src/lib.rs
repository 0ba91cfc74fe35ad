//! 4-bit and 8-bit weight formats on the host: groups, packing, the Marlin tile layout,
//! quantisation and checkpoints. No Burn, no GPU.
//!
//! Everything goes through one form, [`PlainWeight`]: files are read into it ([`checkpoint`]), f32
//! weights are quantised into it ([`quantize_rtn`]), and device layouts are packed from it
//! ([`layout`]).
//!
//! Throughout, K is the number of input features, N of output features, and G of groups along K. A
//! weight is `[K, N]`: the transpose of the `[N, K]` that PyTorch stores.
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
    Bits, GroupSize, JoinError, PlainParts, PlainWeight, QuantSpec, ScaleDtype, Scales, Sparsity,
    TensorDescriptor, TensorDtype, WeightDescriptor, WeightFormat, WeightLayout, WeightTensor,
    WeightTensors, check_two_four, expand_two_four, prune_two_four, quantize, quantize_rtn,
    quantize_two_four,
};
