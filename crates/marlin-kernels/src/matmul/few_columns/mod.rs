//! The product of a router, and of the float projections of a few rows: activations times a float
//! weight [N, K] whose features are contiguous, as in checkpoints.
//!
//! The weight is small, and the product is bound by the latency of its loads. So a block has only
//! 16 columns and 8 rows, and its 16 warps divide K.

#[cfg(feature = "cubecl-runtime")]
mod kernel;
#[cfg(feature = "inspect")]
mod source;

#[cfg(feature = "inspect")]
pub use source::source;

use crate::{FloatProblem, Target};
#[cfg(feature = "cubecl-runtime")]
use {
    crate::matmul::float::FloatOperands,
    crate::{ActivationDtype, Kernel, KernelError, pdl},
    cubecl::client::Client,
    cubecl::prelude::*,
};

/// Maximum number of columns. With more, the kernels of the lm_head have enough blocks for many
/// rows.
const MAX_COLUMNS: usize = 1024;
/// Maximum number of columns of the rows of one block.
const MAX_COLUMNS_OF_FEW_ROWS: usize = 16_384;
/// Maximum number of rows: the blocks of more rows do not fit an H200 at the same time, and read
/// the weight from the second-level cache too often.
const MAX_ROWS: usize = 128;
/// Features in a step, which is two products.
const STEP: usize = 32;
/// Maximum number of features, for which the steps of a warp are unrolled.
const MAX_FEATURES: usize = 16_384;
/// Columns of a block.
const COLUMNS: usize = 16;
/// Rows of a block.
const ROWS: usize = 8;
/// Warps of a block.
const WARPS: usize = 16;

/// Returns true if the kernel supports a problem: 2 to 128 rows of f16 or bf16 on a card with
/// tensor cores, a K that is a multiple of 32 and at most 16,384, and up to 1024 columns, or 16,384
/// for up to 8 rows.
pub fn supports(problem: &FloatProblem, target: &Target) -> bool {
    let FloatProblem { m, k, n, .. } = *problem;
    problem.is_for_tensor_cores(target)
        && (2..=MAX_ROWS).contains(&m)
        && n > 0
        && (n <= MAX_COLUMNS || m <= ROWS && n <= MAX_COLUMNS_OF_FEW_ROWS)
        && (1..=MAX_FEATURES).contains(&k)
        && k.is_multiple_of(STEP)
}

/// Multiplies `x` by the transposed weight; sums are accumulated in f32 and rounded once,
/// with the bias.
///
/// # Errors
/// Returns an error for a problem that the kernel does not [support](supports), and for a buffer of
/// the wrong length.
#[cfg(feature = "cubecl-runtime")]
pub fn launch(
    client: &Client,
    problem: &FloatProblem,
    operands: FloatOperands,
) -> Result<(), KernelError> {
    let FloatProblem { m, k, n, dtype } = *problem;
    let target = Target::of(client);
    if !supports(problem, &target) {
        return Err(KernelError::NotLaunchable {
            kernel: Kernel::FewColumns,
            runtime: target.runtime,
        });
    }
    operands.expect(problem)?;
    let FloatOperands {
        x,
        weight,
        bias,
        out,
    } = operands;
    Kernel::FewColumns.trace(problem);
    // SAFETY: the lengths of all buffers were checked; columns and rows beyond the last are read as
    // the last one, and not written.
    unsafe {
        kernel::few_columns::launch_unchecked(
            client,
            CubeCount::new_2d(n.div_ceil(COLUMNS) as u32, m.div_ceil(ROWS) as u32),
            CubeDim::new_1d(32 * WARPS as u32),
            x,
            weight,
            bias.into(),
            out,
            n as u32,
            m as u32,
            k,
            dtype == ActivationDtype::BF16,
            pdl::is_supported(&target),
            dtype.elem(),
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}
