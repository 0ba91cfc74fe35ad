use super::super::config::THREADS;
use super::super::source::compiled_sizes;
use super::config::ExpertGemvConfig;
use super::kernel::expert_gemv::ExpertGemv;
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the kernel of `config`, with biases, and with or without a correction
/// of the scores, on a card of compute capability `capability` (90 for 9.0).
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn expert_source(
    config: &ExpertGemvConfig,
    has_correction: bool,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let gemv = config.gemv;
    let kernel = ExpertGemv::new(
        settings(THREADS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        optional(has_correction),
        (),
        buffer(),
        buffer(),
        optional(gemv.zero_points),
        optional(true),
        buffer(),
        compiled_sizes(),
        gemv.lane_values(),
        *config,
        gemv.products().dtype().elem(),
        config.logits.elem(),
    );
    cuda_text(&kernel, capability)
}
