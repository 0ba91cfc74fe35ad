use super::VALUES;
use super::kernel::float_gemv::FloatGemv;
use super::kernel::{FloatGemvConfig, THREADS};
use crate::ActivationDtype;
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use crate::pdl;
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the product of one row of f16 or bf16 with a weight of `features` input
/// features, a multiple of 8, with or without a norm before it.
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn source(
    features: usize,
    has_norm: bool,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let kernel = FloatGemv::new(
        settings(THREADS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        optional(has_norm),
        optional(has_norm),
        optional(has_norm),
        optional(has_norm),
        buffer(),
        optional(true),
        buffer(),
        (),
        (),
        FloatGemvConfig {
            vectors: features / VALUES,
            has_norm,
            bf16: dtype == ActivationDtype::BF16,
            uses_pdl: pdl::is_supported_by(capability),
        },
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
