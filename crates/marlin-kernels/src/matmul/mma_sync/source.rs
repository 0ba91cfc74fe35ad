use super::kernel::matmul::Matmul;
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use crate::pdl;
use crate::tile::sizes::compiled_lengths;
use crate::tile::{Config, RowOrder};
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the kernel of `config` on a card of compute capability `capability` (80
/// for 8.0).
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn source(config: &Config, capability: u32) -> Result<KernelSource, CompilationError> {
    let kernel = Matmul::new(
        settings(config.block_threads(), ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        optional(config.tile.is_sparse()),
        buffer(),
        optional(config.zero_points),
        optional(config.tile.is_fp8()),
        optional(true),
        optional(config.rows.has_experts()),
        optional(config.rows == RowOrder::Gathered),
        buffer(),
        buffer(),
        compiled_lengths(),
        *config,
        pdl::is_supported_by(capability),
        config.dtype().elem(),
    );
    cuda_text(&kernel, capability)
}
