use crate::problem::expect_length;
use crate::{ActivationDtype, KernelError, QuantProblem, WeightBuffers};
use cubecl::prelude::*;

/// The number of values of a row of activations that are copied at a time.
const RUN: usize = 8;

/// Returns the number of values in a row of activations of `k` features, padded so that rows start
/// at multiples of 16 bytes.
pub fn row_length(k: usize) -> usize {
    k.next_multiple_of(RUN)
}

/// Checks all assumptions of the tile-layout kernels about a problem and its buffers, except the
/// activations.
pub(crate) fn expect_operands(
    problem: &QuantProblem,
    weight: &WeightBuffers,
    bias: Option<&BufferArg>,
    out: &BufferArg,
) -> Result<(), KernelError> {
    problem.expect_addressable()?;
    if problem.weight.experts != 1 {
        return Err(KernelError::Shape {
            problem: problem.to_string(),
            reason: "a weight with experts is multiplied by `experts::multiply`",
        });
    }
    problem.expect_weight(&weight.as_ref().map(|_, buffer| buffer.len()))?;
    if problem.activations == ActivationDtype::F32 || problem.scales != problem.activations {
        return Err(KernelError::DtypePair {
            activations: problem.activations,
            scales: problem.scales,
        });
    }
    problem.expect_outputs(out.len(), bias.map(BufferArg::len))
}

/// Checks the length of activations in the order of the stored rows, padded to [`row_length`].
pub(crate) fn expect_arranged(problem: &QuantProblem, x: &BufferArg) -> Result<(), KernelError> {
    expect_length(
        problem,
        "activations",
        problem.m * row_length(problem.k()),
        x.len(),
    )
}
