//! W4A16 and W8A16 matmul kernels, their launch, and the choice among them. No Burn.
//!
//! One folder a routine. [`select`] is the only place that decides which routine runs; it is host code, free of any device, and says why.
//!
//! | routine | runs on | for |
//! |---|---|---|
//! | [`portable`] | every CubeCL runtime | weights of 4 or 8 bits, any M, N, K, group, f32/f16/bf16; no tensor cores |
//! | [`marlin`] | CUDA from compute capability 8.0 on | weights of 4 bits, f16/bf16 activations, any M, N, K, group |
//! | [`marlin::gemv`] | CUDA from compute capability 9.0 on | one row, with the norm before it |
//! | [`repack`] | every CubeCL runtime | weights between the [`WeightLayout`]s, activations into the order that [`marlin`] reads |
//! | [`host`] | the CPU, without CubeCL | weights of 4 or 8 bits on Burn's Flex backend, and the rest of a decode step there |

pub mod decode;
mod error;
pub mod host;
mod layout;
pub mod marlin;
pub mod portable;
mod problem;
#[allow(missing_docs, reason = "`#[cube]` makes a module and a struct of every function, without a line on them")]
pub mod ptx;
pub mod repack;
mod select;

use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::prelude::{CubeCount, CubeDim};

pub use error::KernelError;
pub use layout::WeightLayout;
pub use problem::{ActivationDtype, Problem, Runtime, Target};
pub use select::{Kernel, Plan, Reason, layout_for, select, select_converted};

/// Cubes and units of a kernel that has one unit for each of so many elements.
pub(crate) fn elementwise(client: &Client, elements: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, elements);
    (calculate_cube_count_elemwise(client, elements, dim), dim)
}
