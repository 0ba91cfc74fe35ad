use super::combine::weighted_sums::WeightedSums;
use super::gather::permuted_rows::PermutedRows;
use super::route::choose_and_sort::ChooseAndSort;
use super::route_few::choose_and_sort_few::ChooseAndSortFew;
use super::{Router, combine, gather, route, route_few};
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use crate::{ActivationDtype, pdl};
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA text of [`route`](super::route) for a number of tokens on a card of compute capability `capability`
/// (90 for 9.0), with or without a correction.
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn route_source(
    router: Router,
    tokens: usize,
    block_rows: usize,
    has_correction: bool,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let units = route::units(&router, tokens);
    if route_few::is_few(&router, tokens) {
        let kernel = ChooseAndSortFew::new(
            settings(units, ExecutionMode::Unchecked),
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
        return cuda_text(&kernel, capability);
    }
    let kernel = ChooseAndSort::new(
        settings(units, ExecutionMode::Unchecked),
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

/// Returns the CUDA text of [`gather`](super::gather) on a card of compute capability `capability`,
/// of rows of tokens or of rows in the order of experts.
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn gather_source(
    of_tokens: bool,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let kernel = PermutedRows::new(
        settings(gather::UNITS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        buffer(),
        optional(of_tokens),
        buffer(),
        (),
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
