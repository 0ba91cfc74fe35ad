use super::kernel::matmul::Matmul;
use crate::inspect::{Source, buffer, cuda_text, optional, properties, settings, target};
use crate::overlap;
use crate::tile::Config;
use crate::tile::lengths::compiled_lengths;
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the kernel of `config` on a card of compute capability `capability` (80
/// for 8.0).
///
/// # Errors
/// Returns CubeCL's error if it refuses the kernel.
pub fn source(config: &Config, capability: u32) -> Result<Source, CompilationError> {
    let kernel = Matmul::new(
        settings(config.block_threads(), ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        optional(config.tile.is_sparse()),
        buffer(),
        optional(config.zero_points),
        optional(true),
        buffer(),
        buffer(),
        compiled_lengths(),
        *config,
        overlap::is_supported_by(capability),
        config.dtype().elem(),
    );
    cuda_text(&kernel, capability)
}
