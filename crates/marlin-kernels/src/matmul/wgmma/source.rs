use super::kernel::matmul::Matmul;
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use crate::tile::Config;
use crate::tile::sizes::compiled_lengths;
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the kernel of `config` on a card of compute capability `capability` (90
/// for 9.0).
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn source(config: &Config, capability: u32) -> Result<KernelSource, CompilationError> {
    let kernel = Matmul::new(
        settings(config.block_threads(), ExecutionMode::Unchecked),
        properties(capability),
        target(),
        (),
        buffer(),
        optional(config.tile.is_sparse()),
        buffer(),
        optional(config.zero_points),
        optional(config.tile.is_fp8()),
        optional(true),
        optional(config.rows.has_experts()),
        buffer(),
        buffer(),
        compiled_lengths(),
        *config,
        config.dtype().elem(),
    );
    cuda_text(&kernel, capability)
}
