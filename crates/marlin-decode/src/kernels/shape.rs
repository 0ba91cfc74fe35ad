use marlin_kernels::{ActivationDtype, KernelError};
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
