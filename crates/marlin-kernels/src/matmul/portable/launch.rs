use super::kernel::{self, PortableSizesLaunch};
use crate::launch::elementwise;
use crate::problem::expect_length;
use crate::{KernelError, Operands, QuantProblem, WeightBuffers};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_format::layout::PlainLayout;

/// Launches the multiplication of activations [M, K] with a weight in the plain layout, with `rows`
/// rows per unit (1 to 8).
///
/// # Errors
/// Returns an error for a buffer of the wrong length, an operand that does not fit the format, or a
/// dtype that the device does not support.
pub(crate) fn launch(
    client: &Client,
    problem: &QuantProblem,
    rows: usize,
    operands: Operands,
) -> Result<(), KernelError> {
    let Operands {
        x,
        weight,
        bias,
        out,
        ..
    } = operands;
    let sizes = check(client, problem, &weight)?;
    expect_length(problem, "activations", problem.m * problem.k(), x.len())?;
    problem.expect_outputs(out.len(), bias.as_ref().map(BufferArg::len))?;
    if problem.m == 0 {
        return Ok(());
    }
    let units = problem.m.div_ceil(rows) * problem.n();
    let (count, dim) = elementwise(client, units);
    kernel::matmul::launch(
        client,
        count,
        dim,
        x,
        weight.qweight,
        weight.scales,
        weight.zero_points.into(),
        weight.row_permutation.into(),
        bias.into(),
        out,
        sizes,
        problem.spec().value,
        rows,
        problem.activations.elem(),
        problem.scales.elem(),
    );
    Ok(())
}

/// Dequantises a weight in the plain layout: writes the float weight [K, N] in natural row order
/// and the problem's activation dtype.
///
/// # Errors
/// The same as [`launch`].
pub(crate) fn dequantize(
    client: &Client,
    problem: &QuantProblem,
    weight: WeightBuffers,
    out: BufferArg,
) -> Result<(), KernelError> {
    let sizes = check(client, problem, &weight)?;
    let units = problem.k() * problem.n();
    expect_length(problem, "output", units, out.len())?;
    let (count, dim) = elementwise(client, units);
    kernel::dequantize::launch(
        client,
        count,
        dim,
        weight.qweight,
        weight.scales,
        weight.zero_points.into(),
        weight.row_permutation.into(),
        out,
        sizes,
        problem.spec().value,
        problem.activations.elem(),
        problem.scales.elem(),
    );
    Ok(())
}

/// Checks all assumptions of the two kernels about the weight and the device.
fn check(
    client: &Client,
    problem: &QuantProblem,
    weight: &WeightBuffers,
) -> Result<PortableSizesLaunch, KernelError> {
    problem.expect_addressable()?;
    for dtype in [problem.activations, problem.scales] {
        dtype.expect_on(client)?;
    }
    problem.expect_weight(&weight.as_ref().map(|_, buffer| buffer.len()))?;
    let (k, n, spec) = (problem.k(), problem.n(), problem.spec());
    let columns = PlainLayout::new(k, n, spec.value).columns();
    Ok(PortableSizesLaunch::new(
        problem.m,
        n,
        k,
        columns,
        spec.scales.group.rows(k),
    ))
}
