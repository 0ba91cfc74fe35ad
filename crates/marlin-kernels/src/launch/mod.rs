//! The launch of a plan. Every matmul with a quantised weight on a CubeCL runtime is launched by
//! this module.

mod geometry;
mod marlin;
pub(crate) mod tile;

use crate::matmul::{gemv, portable};
use crate::plan::{EpilogueStage, PrologueStage};
use crate::problem::expect_length;
use crate::tile::operands::expect_operands;
use crate::tile::row_length;
use crate::{Epilogue, Kernel, KernelError, Plan, QuantProblem, Target, repack};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_format::WeightTensors;
use std::fmt::Display;

pub use geometry::{elementwise, swizzled_map, vector_size};

/// The buffers of a weight's tensors, one for each tensor that its descriptor lists. Words are u32
/// or i32.
pub type WeightBuffers = WeightTensors<BufferArg>;

/// Operands of [`launch`]. All are contiguous.
pub struct Operands {
    /// Activations [M, K].
    pub x: BufferArg,
    /// Operands of the prologue, if the kernel computes it.
    pub norm: Option<NormOperands>,
    /// The weight, at addresses that are multiples of 16.
    pub weight: WeightBuffers,
    /// The bias `[N]`, in the activations' dtype.
    pub bias: Option<BufferArg>,
    /// The output: [M, N], or [M, N / 2] with SwiGLU, at an address that is a multiple of 16,
    /// because tiles of many rows store 16 bytes at a time. Every element is written.
    pub out: BufferArg,
}

/// Operands of [`Prologue::AddRmsNorm`](crate::Prologue::AddRmsNorm) in the activations' dtype. All
/// are contiguous, at addresses that are multiples of 16.
pub struct NormOperands {
    /// The residual stream [M, K].
    pub residual: BufferArg,
    /// The norm's weight `[K]`.
    pub weight: BufferArg,
    /// The output `x + residual` [M, K], rounded to the dtype; every element is written. It must
    /// not be the buffer of `residual`, which other blocks still read.
    pub sum: BufferArg,
    /// The constant that is added to the mean square.
    pub epsilon: f32,
}

impl NormOperands {
    /// Returns the residual stream, the norm's weight and the sum as optional arguments of a
    /// kernel; without a norm, none.
    ///
    /// # Errors
    /// [`KernelError::Length`] for a buffer of the wrong length.
    pub(crate) fn arguments(
        norm: Option<Self>,
        problem: &QuantProblem,
    ) -> Result<[Option<BufferArg>; 3], KernelError> {
        let Some(Self {
            residual,
            weight,
            sum,
            ..
        }) = norm
        else {
            return Ok([None, None, None]);
        };
        let (stream, features) = (problem.m * problem.k(), problem.k());
        for (operand, buffer, length) in [
            ("residual", &residual, stream),
            ("norm weight", &weight, features),
            ("sum", &sum, stream),
        ] {
            expect_length(problem, operand, length, buffer.len())?;
        }
        Ok([residual, weight, sum].map(Some))
    }
}

/// Launches the kernels that the [`plan`](crate::plan) of a problem chose.
///
/// A weight in a layout that the kernel does not read is repacked for the call. Activations are
/// permuted into the order of the stored rows if necessary.
///
/// # Errors
/// Returns an error for a buffer of the wrong length, an operand that does not fit the format,
/// dtypes that the kernel or the device does not support, a plan whose prologue or epilogue is not
/// computed by the matmul, or a plan of another backend.
pub fn launch(
    client: &Client,
    problem: &QuantProblem,
    plan: &Plan,
    operands: Operands,
) -> Result<(), KernelError> {
    plan.kernel.trace(problem);
    let target = Target::of(client);
    if problem.epilogue != Epilogue::None && plan.epilogue != EpilogueStage::InKernel {
        return Err(KernelError::Epilogue {
            problem: problem.to_string(),
            kernel: plan.kernel,
        });
    }
    match (plan.kernel, target.card) {
        (Kernel::Marlin(launch), Some(card)) => {
            marlin::launch(client, &card, problem, &launch, operands)
        }
        (Kernel::Gemv { blocks }, _) if plan.prologue != PrologueStage::Before => {
            expect_operands(
                problem,
                &operands.weight,
                operands.bias.as_ref(),
                &operands.out,
            )?;
            let x = if is_aligned(&operands.x) {
                operands.x
            } else {
                arranged(client, problem, operands.x, None)?
            };
            gemv::launch(client, problem, blocks, Operands { x, ..operands })
        }
        (Kernel::Portable { rows }, _) => {
            let (problem, weight) = repack::to_portable(client, problem, operands.weight)?;
            portable::launch(client, &problem, rows, Operands { weight, ..operands })
        }
        (kernel, _) => Err(KernelError::NotLaunchable {
            kernel,
            runtime: target.runtime,
        }),
    }
}

/// Copies the activations to a new buffer, in the order of the stored rows and padded to
/// [`row_length`].
fn arranged(
    client: &Client,
    problem: &QuantProblem,
    x: BufferArg,
    row_permutation: Option<BufferArg>,
) -> Result<BufferArg, KernelError> {
    let elements = problem.m * row_length(problem.k());
    let arranged = client.empty(elements * problem.activations.elem().size());
    // SAFETY: the buffer was allocated for these elements.
    let out = || unsafe { BufferArg::from_raw_parts(arranged.clone(), elements) };
    repack::arrange(client, problem, x, row_permutation, out())?;
    Ok(out())
}

/// Returns true if kernels that read 16 bytes at a time can read a buffer in place. A view into
/// another buffer may start at any address.
fn is_aligned(buffer: &BufferArg) -> bool {
    match buffer {
        BufferArg::Handle { handle } => handle.handle.offset_start.unwrap_or(0).is_multiple_of(16),
        BufferArg::Alias { .. } => true,
    }
}

/// Returns an argument for the same buffer, for another launch.
///
/// # Errors
/// [`KernelError::Alias`] for an argument that is the alias of another one of its launch.
pub(crate) fn second(
    problem: &impl Display,
    operand: &'static str,
    buffer: &BufferArg,
) -> Result<BufferArg, KernelError> {
    match buffer {
        BufferArg::Handle { handle } => {
            // SAFETY: the length is that of the same buffer.
            Ok(unsafe { BufferArg::from_raw_parts_binding(handle.handle.clone(), buffer.len()) })
        }
        BufferArg::Alias { .. } => Err(KernelError::Alias {
            operand,
            problem: problem.to_string(),
        }),
    }
}

/// Dequantises a weight: writes the float weight [K, N] in natural row order, in the problem's
/// activation dtype. `m` of the problem is not used.
///
/// # Errors
/// Returns an error for a buffer of the wrong length, an operand that does not fit the format, or a
/// dtype that the device does not support.
pub fn dequantize(
    client: &Client,
    problem: &QuantProblem,
    weight: WeightBuffers,
    out: BufferArg,
) -> Result<(), KernelError> {
    let (problem, weight) = repack::to_portable(client, problem, weight)?;
    portable::dequantize(client, &problem, weight, out)
}
