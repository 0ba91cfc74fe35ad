use super::combine::weighted_sums::WeightedSums;
use super::gather::permuted_rows::PermutedRows;
use super::route::RouteKernels;
use super::route::few::choose_and_sort_few::ChooseAndSortFew;
use super::route::sort::choose_and_sort::ChooseAndSort;
use super::route::sort::choose_experts::ChooseExperts;
use super::route::sort::sort_chosen::SortChosen;
use super::{Router, combine, gather, route};
use crate::inspect::{KernelSource, buffer, cuda_text, optional, properties, settings, target};
use crate::{ActivationDtype, pdl};
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// Returns the CUDA texts of the kernels of [`route`](super::route) for a number of tokens, on a
/// card of compute capability `capability` (90 for 9.0), with or without a correction.
///
/// # Errors
/// Returns the compilation error if CubeCL refuses a kernel.
pub fn route_sources(
    router: Router,
    tokens: usize,
    block_rows: usize,
    has_correction: bool,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<Vec<KernelSource>, CompilationError> {
    let (correction, uses_pdl) = (optional(has_correction), pdl::is_supported_by(capability));
    let halves = dtype != ActivationDtype::F32;
    let one = |units| {
        (
            settings(units, ExecutionMode::Unchecked),
            properties(capability),
        )
    };
    match RouteKernels::of(&router, tokens) {
        RouteKernels::Few => {
            let (settings, properties) = one(tokens * route::WARP);
            let kernel = ChooseAndSortFew::new(
                settings,
                properties,
                target(),
                buffer(),
                correction,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                router,
                halves,
                block_rows,
                uses_pdl,
                dtype.elem(),
            );
            Ok(vec![cuda_text(&kernel, capability)?])
        }
        RouteKernels::One => {
            let (settings, properties) = one(route::UNITS);
            let kernel = ChooseAndSort::new(
                settings,
                properties,
                target(),
                buffer(),
                correction,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                (),
                router,
                halves,
                block_rows,
                uses_pdl,
                dtype.elem(),
            );
            Ok(vec![cuda_text(&kernel, capability)?])
        }
        RouteKernels::Two => {
            let (settings, properties) = one(route::CHOOSE_UNITS);
            let choose = ChooseExperts::new(
                settings,
                properties,
                target(),
                buffer(),
                correction,
                buffer(),
                buffer(),
                (),
                (),
                router,
                halves,
                uses_pdl,
                dtype.elem(),
            );
            let (settings, properties) = one(route::UNITS);
            let sort = SortChosen::new(
                settings,
                properties,
                target(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                (),
                router,
                block_rows,
                uses_pdl,
            );
            Ok(vec![
                cuda_text(&choose, capability)?,
                cuda_text(&sort, capability)?,
            ])
        }
    }
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
/// of rows of tokens or of rows in the order of experts, for a weight with or without act-order.
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn gather_source(
    of_tokens: bool,
    permutes: bool,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let kernel = PermutedRows::new(
        settings(gather::UNITS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        optional(permutes),
        buffer(),
        optional(of_tokens),
        buffer(),
        (),
        if permutes { 1 } else { 8 },
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
