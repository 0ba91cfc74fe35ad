use super::tensor_cores::head::Head;
use super::tensor_cores::{LmHeadConfig, WARPS};
use crate::ActivationDtype;
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use crate::pdl;
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the product of `rows` rows of f16 or bf16 with a weight of `features`
/// input features, a multiple of 32.
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn source(
    rows: usize,
    features: usize,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let kernel = Head::new(
        settings(32 * WARPS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        optional(true),
        buffer(),
        (),
        (),
        LmHeadConfig::new(rows, features, dtype),
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
