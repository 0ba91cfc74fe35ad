use super::{Config, Launch};
use crate::problem::expect_length;
use crate::{ActivationDtype, Kernel, KernelError, QuantProblem, WeightBuffers};
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
    expect_dtypes(problem)?;
    problem.expect_outputs(out.len(), bias.map(BufferArg::len))
}

/// Checks that activations and scales are both in f16 or both in bf16.
pub(crate) fn expect_dtypes(problem: &QuantProblem) -> Result<(), KernelError> {
    if problem.activations != ActivationDtype::F32 && problem.scales == problem.activations {
        return Ok(());
    }
    Err(KernelError::DtypePair {
        activations: problem.activations,
        scales: problem.scales,
    })
}

/// Checks that the tile of a launch, whose configuration is `config`, can compute a problem's
/// epilogue.
pub(crate) fn expect_epilogue(
    problem: &QuantProblem,
    launch: &Launch,
    config: &Config,
) -> Result<(), KernelError> {
    if config.takes_columns(problem.n()) && config.takes_epilogue() {
        return Ok(());
    }
    Err(KernelError::Epilogue {
        problem: problem.to_string(),
        kernel: Kernel::Marlin(*launch),
    })
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
