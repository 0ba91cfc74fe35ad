//! Quantised weights on the host: their formats, tensors and values, and the operations on weights.
//!
//! | type | describes |
//! |---|---|
//! | [`QuantSpec`] | how to quantise: bits, group, zero points, scale dtype |
//! | [`WeightFormat`] | a quantised weight of any shape: a spec, act-order, sparsity |
//! | [`WeightDescriptor`] | the tensors of one weight: a format, K, N and a layout |
//! | [`PlainWeight`] | the values of one weight in host memory |

mod descriptor;
mod format;
mod group_size;
mod join;
mod plain;
mod quantize;
mod scales;
mod slice;
mod spec;
mod tensors;
mod two_four;
mod underflow;
mod value;

pub use descriptor::{WeightDescriptor, WeightLayout};
pub use format::{Sparsity, WeightFormat};
pub use group_size::GroupSize;
pub use join::JoinError;
pub(crate) use plain::position;
pub use plain::{PlainParts, PlainWeight};
pub use quantize::quantize_rtn;
pub use scales::Scales;
pub use spec::{QuantSpec, ScaleDtype, ScaleSpec, ZeroPoint};
pub use tensors::{TensorDescriptor, TensorDtype, WeightTensor, WeightTensors};
pub use two_four::{check_two_four, expand_two_four, prune_two_four, quantize, quantize_two_four};
pub use value::WeightValue;
