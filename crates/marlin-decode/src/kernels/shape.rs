use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, UIntKind};
use marlin_kernels::{ActivationDtype, KernelError, Runtime, Target};
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

/// Bytes of shared memory that a cube may have. On the CPU it is memory as any other.
pub(super) fn shared_memory(client: &Client) -> usize {
    if Target::of(client).runtime == Runtime::Cpu { usize::MAX } else { client.properties().hardware.max_shared_memory_size }
}

/// The feature that the kernels of a step need, with activations of a dtype, and a client's device lacks; `None` if it has all.
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
