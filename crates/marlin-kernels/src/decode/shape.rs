use crate::{ActivationDtype, KernelError, Runtime, Target};
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, UIntKind};
use std::fmt;

/// Rows of activations that a kernel works on one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsShape {
    /// Rows: one for each sequence of a decode step, one for each token of a prefill.
    pub rows: usize,
    /// Values of a row.
    pub features: usize,
    /// Dtype of the activations.
    pub dtype: ActivationDtype,
}

impl RowsShape {
    pub(super) fn expect_length(&self, operand: &'static str, expected: usize, found: usize) -> Result<(), KernelError> {
        match found == expected {
            true => Ok(()),
            false => Err(KernelError::BufferLength { operand, problem: self.to_string(), expected, found }),
        }
    }

    /// `end`, which is past the last one used, is at most `limit`.
    pub(super) fn expect_within(&self, what: &'static str, end: usize, limit: usize) -> Result<(), KernelError> {
        match end <= limit {
            true => Ok(()),
            false => Err(KernelError::Outside { what, problem: self.to_string(), end, limit }),
        }
    }
}

impl fmt::Display for RowsShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rows of {} {}", self.rows, self.features, self.dtype)
    }
}

/// Values that a unit loads at a time: 16 bytes, or fewer where rows of `features` values are no multiple of that.
pub(super) fn vector_size(client: &Client, features: usize, dtype: ActivationDtype) -> usize {
    let bytes = dtype.elem().size();
    let widest = (client.properties().hardware.load_width as usize / 8 / bytes).min(16 / bytes);
    (0..).map(|power| widest >> power).find(|&size| features.is_multiple_of(size.max(1))).unwrap_or(1).max(1)
}

/// Bytes of shared memory that a cube may have. On the CPU it is memory as any other.
pub(super) fn shared_memory(client: &Client) -> usize {
    if Target::of(client).runtime == Runtime::Cpu { usize::MAX } else { client.properties().hardware.max_shared_memory_size }
}

/// What a client's device lacks of what a step's kernels need, with activations of a dtype; `None` where it has all.
pub fn lacks(client: &Client, dtype: ActivationDtype) -> Option<&'static str> {
    let computes = |elem: ElemType| client.features().type_usage(elem).contains(TypeUsage::Arithmetic);
    if !computes(dtype.elem()) {
        return Some("the device has no arithmetic in the activations' dtype");
    }
    if !computes(ElemType::UInt(UIntKind::U64)) {
        return Some("the device has no integers of 64 bits");
    }
    None
}
