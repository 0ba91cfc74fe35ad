//! The matmul problem of a float weight.

use super::ActivationDtype;
use crate::Target;
use crate::device::MIN_CAPABILITY;
use std::fmt;

/// A matmul with a float weight whose columns are contiguous, in the activations' dtype:
/// activations [M, K] times the transpose of a table [N, K] gives [M, N].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FloatProblem {
    /// The number of rows of activations, M.
    pub m: usize,
    /// The number of input features, K.
    pub k: usize,
    /// The number of output features, N.
    pub n: usize,
    /// Dtype of activations, weight and output.
    pub dtype: ActivationDtype,
}

impl FloatProblem {
    /// Returns true if a device has tensor cores for the dtype: f16 or bf16 on an NVIDIA card from
    /// compute capability 8.0 on.
    pub(crate) fn is_for_tensor_cores(&self, target: &Target) -> bool {
        let card = target.card;
        self.dtype != ActivationDtype::F32
            && card.is_some_and(|card| card.capability >= MIN_CAPABILITY)
    }
}

impl fmt::Display for FloatProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "M={} N={} K={} {}", self.m, self.n, self.k, self.dtype)
    }
}
