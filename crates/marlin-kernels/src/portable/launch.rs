use super::kernel::{self, LengthsLaunch};
use crate::problem::WeightLengths;
use crate::{KernelError, Problem, elementwise};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_format::layout::PlainLayout;

/// A weight on a device, in the plain layout.
pub struct WeightArgs {
    /// u32 or i32 [K/8 up (of 8 bits K/4 up), N up to a multiple of 8]: [`PlainLayout`].
    pub words: BufferArg,
    /// [G, N] in the problem's scale dtype.
    pub scales: BufferArg,
    /// u32 or i32 [G, N/8 up], eight zero points a word along N (of 8 bits [G, N/4 up], four); absent where symmetric.
    pub zero_points: Option<BufferArg>,
    /// u32 or i32 `[K]`: the natural row of each stored row; absent where rows are in order.
    pub row_permutation: Option<BufferArg>,
}

/// Operands of [`matmul`].
pub struct MatmulArgs {
    /// [M, K], contiguous.
    pub x: BufferArg,
    /// The weight.
    pub weight: WeightArgs,
    /// `[N]` in the activations' dtype.
    pub bias: Option<BufferArg>,
    /// [M, N], contiguous; written whole.
    pub out: BufferArg,
}

/// Operands of [`dequantize`].
pub struct DequantizeArgs {
    /// The weight.
    pub weight: WeightArgs,
    /// [K, N] in the problem's activation dtype, natural row order; written whole.
    pub out: BufferArg,
}

/// Multiplies activations with a packed weight, `rows` rows a unit (1 to 8; what [`crate::select`] says).
///
/// # Errors
/// A buffer of the wrong length, an operand that does not fit the format, or a dtype that the device lacks.
pub fn matmul(client: &Client, problem: &Problem, rows: usize, args: MatmulArgs) -> Result<(), KernelError> {
    let lengths = check(client, problem, &args.weight)?;
    problem.expect_length("activations", problem.m * problem.k, args.x.len())?;
    problem.expect_length("output", problem.m * problem.n, args.out.len())?;
    if let Some(bias) = &args.bias {
        problem.expect_length("bias", problem.n, bias.len())?;
    }
    if problem.m == 0 {
        return Ok(());
    }
    tracing::trace!(%problem, rows, "portable");
    let units = problem.m.div_ceil(rows) * problem.n;
    let (count, dim) = elementwise(client, units);
    kernel::matmul::launch(
        client,
        count,
        dim,
        args.x,
        args.weight.words,
        args.weight.scales,
        args.weight.zero_points.into(),
        args.weight.row_permutation.into(),
        args.bias.into(),
        args.out,
        lengths,
        problem.spec.bits,
        rows,
        problem.activations.elem(),
        problem.scales.elem(),
    );
    Ok(())
}

/// Writes the float weight [K, N] in natural row order. `m` of the problem is not used.
///
/// # Errors
/// As [`matmul`].
pub fn dequantize(client: &Client, problem: &Problem, args: DequantizeArgs) -> Result<(), KernelError> {
    let lengths = check(client, problem, &args.weight)?;
    problem.expect_length("output", problem.k * problem.n, args.out.len())?;
    let units = problem.k * problem.n;
    let (count, dim) = elementwise(client, units);
    kernel::dequantize::launch(
        client,
        count,
        dim,
        args.weight.words,
        args.weight.scales,
        args.weight.zero_points.into(),
        args.weight.row_permutation.into(),
        args.out,
        lengths,
        problem.spec.bits,
        problem.activations.elem(),
        problem.scales.elem(),
    );
    Ok(())
}

/// Checks everything that both kernels assume of the weight and the device.
fn check(client: &Client, problem: &Problem, weight: &WeightArgs) -> Result<LengthsLaunch, KernelError> {
    let Problem { m, n, k, spec, .. } = *problem;
    problem.expect_addressable()?;
    for dtype in [problem.activations, problem.scales] {
        dtype.expect_on(client)?;
    }
    let found = WeightLengths {
        words: weight.words.len(),
        scales: weight.scales.len(),
        zero_points: weight.zero_points.as_ref().map(BufferArg::len),
        row_permutation: weight.row_permutation.as_ref().map(BufferArg::len),
    };
    problem.expect_weight(found)?;
    let columns = PlainLayout::new(k, n, spec.bits).columns();
    Ok(LengthsLaunch::new(m, n, k, columns, spec.group.rows(k)))
}
