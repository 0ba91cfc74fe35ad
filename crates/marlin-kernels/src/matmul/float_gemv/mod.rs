//! The kernel for one row of activations and a float weight [N, K] whose features are contiguous,
//! as in checkpoints: `x W + bias`, or `norm(x + residual) W + bias` with the addition to the
//! residual stream and the RMSNorm fused, in one launch.
//!
//! It computes the float projections of a decode step of one sequence: the router of a mixture of
//! experts, and attention of checkpoints that quantise the experts alone. A warp has a column,
//! or several one after the other. Before it waits for the preceding kernel it loads the first
//! vectors of each lane, and brings the others to the second-level cache ([programmatic dependent
//! launch](crate::pdl)). Every block normalises the row by itself.

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
    crate::problem::expect_length,
    crate::{ActivationDtype, Kernel, KernelError, pdl},
    cubecl::client::Client,
    cubecl::prelude::*,
};

/// Vectors of 16 bytes that a lane loads at the same time.
const LOADS: usize = 8;
/// Warps of a block, each with a column.
const WARPS: usize = 8;
/// Blocks that a multiprocessor runs at the same time, limited by the kernel's registers.
const RESIDENT_BLOCKS: usize = 4;
/// Values of a vector.
const VALUES: usize = 8;
/// Maximum number of columns. With more, the kernels of the lm_head have enough blocks, and need
/// not read the row from shared memory.
const MAX_COLUMNS: usize = 16_384;
/// Maximum number of features: a block holds the row in f32 in its shared memory.
const MAX_FEATURES: usize = 8192;

/// Returns true if the kernel supports a problem: one row of f16 or bf16 on a card with tensor
/// cores, a K that is a multiple of 8 and at most 8192, and at most 16,384 columns.
pub fn supports(problem: &FloatProblem, target: &Target) -> bool {
    let FloatProblem { m, k, n, .. } = *problem;
    problem.is_for_tensor_cores(target)
        && m == 1
        && (1..=MAX_COLUMNS).contains(&n)
        && (1..=MAX_FEATURES).contains(&k)
        && k.is_multiple_of(VALUES)
}

/// Returns the number of blocks for `n` columns: so many that each warp has one column, or as many
/// as a card runs at the same time, each with as many columns.
#[cfg(feature = "cubecl-runtime")]
fn blocks(n: usize, target: &Target) -> usize {
    let most = target.card.map_or(1, |card| card.multiprocessors) * RESIDENT_BLOCKS;
    let each = n.div_ceil(WARPS * most);
    n.div_ceil(WARPS * each)
}

/// The norm before the product. None of the outputs may share a buffer with an input or with
/// another output, because blocks read the inputs again while others write.
#[cfg(feature = "cubecl-runtime")]
pub struct FloatNorm {
    /// The residual stream `[K]`, which is added to the activations.
    pub residual: BufferArg,
    /// The norm's weight `[K]`.
    pub weight: BufferArg,
    /// The output `x + residual` `[K]`; every element is written.
    pub sum: BufferArg,
    /// The output `norm(x + residual)` `[K]`; every element is written.
    pub normalised: BufferArg,
    /// The constant that is added to the mean square.
    pub epsilon: f32,
}

/// Launches the kernel, with a norm if the product has the normalised activations. Sums are
/// accumulated in f32 and rounded once, with the bias.
///
/// # Errors
/// Returns an error for a problem that the kernel does not [support](supports), and for a buffer of
/// the wrong length.
#[cfg(feature = "cubecl-runtime")]
pub fn launch(
    client: &Client,
    problem: &FloatProblem,
    norm: Option<FloatNorm>,
    operands: FloatOperands,
) -> Result<(), KernelError> {
    let FloatProblem { k, n, dtype, .. } = *problem;
    let target = Target::of(client);
    if !supports(problem, &target) {
        return Err(KernelError::NotLaunchable {
            kernel: Kernel::FloatGemv,
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
    let epsilon = norm.as_ref().map_or(0.0, |norm| norm.epsilon);
    let has_norm = norm.is_some();
    let [residual, norm, sum, normalised] = match norm {
        Some(FloatNorm {
            residual,
            weight,
            sum,
            normalised,
            ..
        }) => {
            for (operand, buffer) in [
                ("residual", &residual),
                ("norm weight", &weight),
                ("sum", &sum),
                ("normalised activations", &normalised),
            ] {
                expect_length(problem, operand, k, buffer.len())?;
            }
            [residual, weight, sum, normalised].map(Some)
        }
        None => [None, None, None, None],
    };
    Kernel::FloatGemv.trace(problem);
    // SAFETY: the lengths of all buffers were checked; warps without a column load and write
    // nothing.
    unsafe {
        kernel::float_gemv::launch_unchecked(
            client,
            CubeCount::new_1d(blocks(n, &target) as u32),
            CubeDim::new_1d((32 * WARPS) as u32),
            x,
            residual.into(),
            norm.into(),
            sum.into(),
            normalised.into(),
            weight,
            bias.into(),
            out,
            n as u32,
            epsilon,
            kernel::FloatGemvConfig {
                vectors: k / VALUES,
                has_norm,
                bf16: dtype == ActivationDtype::BF16,
                uses_pdl: pdl::is_supported(&target),
            },
            dtype.elem(),
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}
