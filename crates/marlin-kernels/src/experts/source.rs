use super::combine::weighted_sums::WeightedSums;
use super::route::choose_and_sort::ChooseAndSort;
use super::{Router, combine, route};
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use crate::{ActivationDtype, pdl};
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of [`route`](super::route) on a card of compute capability `capability`
/// (90 for 9.0), with or without a correction.
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn route_source(
    router: Router,
    block_rows: usize,
    has_correction: bool,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let kernel = ChooseAndSort::new(
        settings(route::UNITS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        optional(has_correction),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        (),
        (),
        router,
        block_rows,
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}

/// Returns the CUDA text of [`combine`](super::combine) on a card of compute capability
/// `capability`, with vectors of `size` values, with or without a tensor that is added.
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn combine_source(
    top_k: usize,
    size: usize,
    has_beside: bool,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let kernel = WeightedSums::new(
        settings(combine::UNITS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        buffer(),
        optional(has_beside),
        buffer(),
        (),
        top_k,
        size,
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
