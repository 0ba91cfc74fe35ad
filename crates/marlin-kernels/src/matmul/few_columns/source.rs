use super::WARPS;
use super::kernel::few_columns::FewColumns;
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use crate::{ActivationDtype, pdl};
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the product of rows of f16 or bf16 with a weight of few columns and
/// `features` input features, on a card of compute capability `capability`.
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn source(
    features: usize,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let kernel = FewColumns::new(
        settings(32 * WARPS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        optional(true),
        buffer(),
        (),
        (),
        features,
        dtype == ActivationDtype::BF16,
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
