use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, UIntKind};
use marlin_kernels::{ActivationDtype, KernelError, Runtime, Target};
use std::fmt;

/// The shape of activations that a kernel processes row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsShape {
    /// The number of rows: one per sequence in a decode step, one per token in prefill.
    pub rows: usize,
    /// The number of values of a row.
    pub features: usize,
    /// The dtype of the activations.
    pub dtype: ActivationDtype,
}

impl RowsShape {
    /// Checks that `end`, one past the last index used, is at most `limit`.
    pub(crate) fn expect_within(
        &self,
        what: &'static str,
        end: usize,
        limit: usize,
    ) -> Result<(), KernelError> {
        match end <= limit {
            true => Ok(()),
            false => Err(KernelError::Outside {
                what,
                problem: self.to_string(),
                end,
                limit,
            }),
        }
    }
}

impl fmt::Display for RowsShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rows of {} {}", self.rows, self.features, self.dtype)
    }
}

/// Returns the number of bytes of shared memory that a cube may use. On the CPU, shared memory is
/// ordinary memory without a limit.
pub(super) fn shared_memory(client: &Client) -> usize {
    if Target::of(client).runtime == Runtime::Cpu {
        usize::MAX
    } else {
        client.properties().hardware.max_shared_memory_size
    }
}

/// Returns the maximum number of units of a cube that processes a row: 1 on the CPU, because one
/// core runs a whole cube there.
pub(super) fn most_units(client: &Client) -> usize {
    if Target::of(client).runtime == Runtime::Cpu {
        1
    } else {
        client.properties().hardware.max_units_per_cube as usize
    }
}

/// Returns the reason why a client's device cannot run the kernels of a step with activations of a
/// dtype; `None` if the device can run them.
pub fn lacks(client: &Client, dtype: ActivationDtype) -> Option<&'static str> {
    let computes = |elem: ElemType| {
        client
            .features()
            .type_usage(elem)
            .contains(TypeUsage::Arithmetic)
    };
    if !computes(dtype.elem()) {
        return Some("the device has no arithmetic in the activations' dtype");
    }
    if !computes(ElemType::UInt(UIntKind::U64)) {
        return Some("the device has no integers of 64 bits");
    }
    None
}
