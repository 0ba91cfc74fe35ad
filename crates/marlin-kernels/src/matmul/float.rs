//! What the kernels of float weights share: their operands, the launch of a planned one, and the
//! bias.

use super::{few_columns, float_gemv, lm_head};
use crate::problem::expect_length;
use crate::{FloatProblem, Kernel, KernelError, Target};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Operands of a product with a float weight. All are contiguous, at addresses that are multiples
/// of 16.
pub struct FloatOperands {
    /// The activations [M, K].
    pub x: BufferArg,
    /// The weight [N, K].
    pub weight: BufferArg,
    /// The bias `[N]`.
    pub bias: Option<BufferArg>,
    /// The output [M, N]; every element is written.
    pub out: BufferArg,
}

impl FloatOperands {
    /// Checks the lengths of the buffers.
    pub(crate) fn expect(&self, problem: &FloatProblem) -> Result<(), KernelError> {
        let FloatProblem { m, k, n, .. } = *problem;
        expect_length(problem, "activations", m * k, self.x.len())?;
        expect_length(problem, "weight", n * k, self.weight.len())?;
        expect_length(problem, "output", m * n, self.out.len())?;
        match &self.bias {
            Some(bias) => expect_length(problem, "bias", n, bias.len()),
            None => Ok(()),
        }
    }
}

/// Launches the kernel that the [`plan`](crate::plan) of a problem chose. Sums are accumulated in
/// f32 and rounded once, with the bias.
///
/// # Errors
/// The errors of the kernel's own launch, and [`KernelError::NotLaunchable`] for a kernel that is
/// not one of this crate's for float weights.
pub fn launch(
    client: &Client,
    problem: &FloatProblem,
    kernel: Kernel,
    operands: FloatOperands,
) -> Result<(), KernelError> {
    match kernel {
        Kernel::FloatGemv => float_gemv::launch(client, problem, None, operands),
        Kernel::FewColumns => few_columns::launch(client, problem, operands),
        Kernel::LmHead(kernel) => lm_head::launch(client, problem, kernel, operands),
        _ => Err(KernelError::NotLaunchable {
            kernel,
            runtime: Target::of(client).runtime,
        }),
    }
}

/// Returns the total of a column with its bias.
#[cube]
pub(super) fn biased<F: Float>(total: f32, bias: &ComptimeOption<&[F]>, column: usize) -> f32 {
    let mut total = total;
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => total += f32::cast_from(bias[column]),
        ComptimeOption::None => {}
    }
    total
}
