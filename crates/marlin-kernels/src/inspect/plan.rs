//! The text of the kernel that a plan launches.

use super::Source;
use crate::matmul::{gemv, mma_sync, wgmma};
use crate::tile::cost::format;
use crate::{Kernel, QuantProblem};
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the tensor-core kernel that computes `problem` on a card of compute capability `capability` (90 for 9.0); `None` if `kernel` is another
/// one.
///
/// # Errors
/// CubeCL refuses the kernel.
pub fn source_of(problem: &QuantProblem, kernel: &Kernel, capability: u32) -> Result<Option<Source>, CompilationError> {
    let format = format(problem);
    let source = match *kernel {
        Kernel::Marlin(launch) if launch.tile.is_wgmma() => wgmma::source(&format.config(launch.tile), capability),
        Kernel::Marlin(launch) => mma_sync::source(&format.config(launch.tile), capability),
        Kernel::Gemv { blocks } => gemv::source(&gemv::Config::new(blocks, &format, problem.prologue), capability),
        _ => return Ok(None),
    };
    source.map(Some)
}
