//! The product of a language model's lm_head: few rows of activations times a float weight [N, K]
//! whose columns are contiguous, as in checkpoints.
//!
//! | file | holds |
//! |---|---|
//! | `tensor_cores` | two or more rows of f16 or bf16, on NVIDIA cards from compute capability 8.0 on |
//! | `planes` | a few rows of any dtype, on every CubeCL runtime |

#[cfg(feature = "cubecl-runtime")]
mod planes;
#[cfg(feature = "inspect")]
mod source;
mod tensor_cores;

#[cfg(feature = "inspect")]
pub use source::source;

use crate::{FloatProblem, Target};
#[cfg(feature = "cubecl-runtime")]
use {
    super::float::FloatOperands,
    crate::launch::vector_size,
    crate::planes::Planes,
    crate::{Kernel, KernelError, pdl},
    cubecl::client::Client,
    cubecl::prelude::*,
};

/// Maximum number of rows on tensor cores. Measured on an H200, 4096 features, 32,000 columns: 71
/// us for up to 8 rows, 78 for 16, at most 118 for 32, 121 for 64; Burn's matmul takes 131 for 16
/// and 177 for 64. Reading the weight's bytes takes 60.
const MAX_ROWS: usize = 64;
/// Maximum number of rows without tensor cores: 64 us for one row, 75 for two, 104 for four, 263
/// for eight.
const MAX_PLANE_ROWS: usize = 4;
/// Minimum number of rows for which the tensor cores are faster.
const MIN_TENSOR_CORE_ROWS: usize = 2;

/// A kernel of the lm_head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LmHeadKernel {
    /// `mma.sync` on tensor cores, a block for 16 columns.
    TensorCores,
    /// A plane for each column.
    Planes,
}

/// Returns the kernel for a problem; `None` if the problem has too many rows.
pub fn plan(problem: &FloatProblem, target: &Target) -> Option<LmHeadKernel> {
    let tensor_cores =
        problem.is_for_tensor_cores(target) && problem.k.is_multiple_of(tensor_cores::STEP);
    match problem.m {
        MIN_TENSOR_CORE_ROWS..=MAX_ROWS if tensor_cores => Some(LmHeadKernel::TensorCores),
        0..=MAX_PLANE_ROWS => Some(LmHeadKernel::Planes),
        _ => None,
    }
}

/// Launches a kernel of the lm_head: `x` times the transposed weight, accumulated in f32 and
/// rounded once, with the bias.
///
/// # Errors
/// Returns an error for a buffer of the wrong length, a kernel that does not support the problem,
/// or a dtype that the device does not support.
#[cfg(feature = "cubecl-runtime")]
pub fn launch(
    client: &Client,
    problem: &FloatProblem,
    kernel: LmHeadKernel,
    operands: FloatOperands,
) -> Result<(), KernelError> {
    let FloatProblem { m, k, n, dtype } = *problem;
    dtype.expect_on(client)?;
    operands.expect(problem)?;
    let most = if kernel == LmHeadKernel::TensorCores {
        MAX_ROWS
    } else {
        MAX_PLANE_ROWS
    };
    if m > most {
        return Err(KernelError::Outside {
            what: "rows",
            problem: problem.to_string(),
            end: m,
            limit: most,
        });
    }
    Kernel::LmHead(kernel).trace(problem);
    let FloatOperands {
        x,
        weight,
        bias,
        out,
    } = operands;
    if out.is_empty() {
        return Ok(());
    }
    let uses_pdl = pdl::is_supported(&Target::of(client));
    match kernel {
        LmHeadKernel::TensorCores => {
            let config = tensor_cores::LmHeadConfig::new(m, k, dtype);
            let count = CubeCount::Static(n.div_ceil(config.columns()) as u32, 1, 1);
            let dim = CubeDim::new_1d(32 * tensor_cores::WARPS as u32);
            let address = AddressType::from_len(n * k / 8);
            // SAFETY: the lengths of all buffers were checked; columns and rows beyond the last are
            // read as the last one, and not written.
            unsafe {
                tensor_cores::head::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    x,
                    weight,
                    bias.into(),
                    out,
                    n,
                    m,
                    config,
                    uses_pdl,
                    dtype.elem(),
                )
            };
        }
        LmHeadKernel::Planes => {
            let size = vector_size(client, k, dtype);
            let plane = Planes::of(client);
            let most = client.properties().hardware.max_units_per_cube as usize / plane.size;
            let planes = if plane.size == 1 {
                1
            } else {
                planes::PLANES.min(most)
            };
            let dim = CubeDim::new_1d((plane.size * planes) as u32);
            let count = CubeCount::Static(n.div_ceil(planes) as u32, 1, 1);
            planes::head_columns::launch(
                client,
                count,
                dim,
                size,
                x,
                weight,
                bias.into(),
                out,
                n,
                k,
                k / size,
                m,
                plane,
                uses_pdl,
                dtype.elem(),
            );
        }
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}
