//! The CUDA text of the kernel of a tile, and of the kernel that a plan launches.

use super::KernelSource;
use crate::matmul::{gemv, mma_sync, wgmma};
use crate::tile::Config;
use crate::tile::cost::format;
use crate::{Kernel, QuantProblem};
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the Marlin kernel of a configuration on a card of compute capability
/// `capability` (90 for 9.0). The tile determines the kernel: that of [`wgmma`] or that of
/// [`mma_sync`].
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn tile_source(config: &Config, capability: u32) -> Result<KernelSource, CompilationError> {
    match config.tile.is_wgmma() {
        true => wgmma::source(config, capability),
        false => mma_sync::source(config, capability),
    }
}

/// Returns the CUDA text of the tensor-core kernel that computes `problem` on a card of compute
/// capability `capability` (90 for 9.0); `None` if `kernel` is not a tensor-core kernel.
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn source_of(
    problem: &QuantProblem,
    kernel: &Kernel,
    capability: u32,
) -> Result<Option<KernelSource>, CompilationError> {
    let format = format(problem);
    let source = match *kernel {
        Kernel::Marlin(launch) => tile_source(&format.config(launch.tile), capability),
        Kernel::Gemv { blocks } => gemv::source(
            &gemv::GemvConfig::new(blocks, &format, problem.prologue),
            capability,
        ),
        _ => return Ok(None),
    };
    source.map(Some)
}
