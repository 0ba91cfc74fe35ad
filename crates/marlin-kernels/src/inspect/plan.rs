//! The CUDA text of the kernel of a tile, and of the kernel that a plan launches.

use super::Source;
use crate::matmul::{gemv, mma_sync, wgmma};
use crate::tile::Config;
use crate::tile::cost::format;
use crate::{Kernel, QuantProblem};
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the Marlin kernel of a configuration on a card of compute capability
/// `capability` (90 for 9.0). The tile decides whether it is the kernel of [`wgmma`] or of
/// [`mma_sync`].
///
/// # Errors
/// Returns CubeCL's error if it refuses the kernel.
pub fn tile_source(config: &Config, capability: u32) -> Result<Source, CompilationError> {
    match config.tile.is_wgmma() {
        true => wgmma::source(config, capability),
        false => mma_sync::source(config, capability),
    }
}

/// Returns the CUDA text of the tensor-core kernel that computes `problem` on a card of compute
/// capability `capability` (90 for 9.0); `None` if `kernel` is not a tensor-core kernel.
///
/// # Errors
/// Returns CubeCL's error if it refuses the kernel.
pub fn source_of(
    problem: &QuantProblem,
    kernel: &Kernel,
    capability: u32,
) -> Result<Option<Source>, CompilationError> {
    let format = format(problem);
    let source = match *kernel {
        Kernel::Marlin(launch) => tile_source(&format.config(launch.tile), capability),
        Kernel::Gemv { blocks } => gemv::source(
            &gemv::Config::new(blocks, &format, problem.prologue),
            capability,
        ),
        _ => return Ok(None),
    };
    source.map(Some)
}
