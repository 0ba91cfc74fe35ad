use super::config::{GemvConfig, GemvSizesCompilationArg, THREADS};
use super::kernel::gemv::Gemv;
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use crate::tile::sizes::compiled_masks;
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the kernel of `config` on a card of compute capability `capability` (90
/// for 9.0).
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn source(config: &GemvConfig, capability: u32) -> Result<KernelSource, CompilationError> {
    let kernel = Gemv::new(
        settings(THREADS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        optional(config.has_norm()),
        optional(config.has_norm()),
        optional(config.has_norm()),
        buffer(),
        optional(config.is_sparse()),
        buffer(),
        optional(config.zero_points),
        optional(true),
        buffer(),
        (),
        compiled_sizes(),
        config.lane_values(),
        *config,
        config.products().dtype().elem(),
    );
    cuda_text(&kernel, capability)
}

/// Returns the compilation argument of the lengths of a problem.
pub(super) fn compiled_sizes() -> GemvSizesCompilationArg {
    GemvSizesCompilationArg {
        n: (),
        k: (),
        tiles_n: (),
        tiles_k: (),
        groups: (),
        masks: compiled_masks(),
    }
}
