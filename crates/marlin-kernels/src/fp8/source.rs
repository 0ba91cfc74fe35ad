use super::kernel::quantize_rows::QuantizeRows;
use super::kernel::{RUN, RowsConfig};
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use crate::{ActivationDtype, pdl};
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of the kernel that rounds rows of `features` activations to e4m3, with or
/// without the norm, on a card of compute capability `capability` (90 for 9.0).
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn source(
    features: usize,
    has_norm: bool,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let config = RowsConfig {
        runs: features / RUN,
        has_norm,
    };
    let kernel = QuantizeRows::new(
        settings(config.units(), ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        optional(has_norm),
        optional(has_norm),
        optional(has_norm),
        buffer(),
        buffer(),
        (),
        config,
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
