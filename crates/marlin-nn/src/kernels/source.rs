//! The CUDA source of the row-by-row kernels, generated without a device.

use super::attention::AttentionTarget;
use super::e4m3_cache::{
    CodesConfig, CodesLengthsCompilationArg, UNITS, store::Store, widen::Widen,
};
use super::flash::FlashLengthsCompilationArg;
use super::glu::gated_rows::GatedRows;
use super::norm::{cube_units, rms_norm_rows::RmsNormRows};
use crate::cache::CacheLengthsCompilationArg;
use cubecl::CompilationError;
use cubecl::prelude::*;
use marlin_kernels::inspect::{
    KernelSource, buffer, cuda_text, optional, properties, settings, target,
};
use marlin_kernels::pdl;
use marlin_kernels::planes::Planes;
use marlin_kernels::{ActivationDtype, Epilogue};

/// Generates the CUDA source of RMSNorm for rows of `features` values, with the addition to the
/// residual stream.
pub fn rms_norm_source(
    features: usize,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let size = 16 / dtype.elem().size();
    let vectors = features / size;
    let units = cube_units(vectors, Planes::NVIDIA, 1024);
    let kernel = RmsNormRows::new(
        settings(units, ExecutionMode::Checked),
        properties(capability),
        target(),
        buffer(),
        optional(true),
        buffer(),
        buffer(),
        (),
        size,
        vectors,
        features,
        units,
        Planes::NVIDIA,
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}

/// Generates the CUDA source of a gated linear unit.
pub fn gated_source(
    epilogue: Epilogue,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let kernel = GatedRows::new(
        settings(256, ExecutionMode::Checked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        (),
        16 / dtype.elem().size(),
        epilogue,
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}

/// Generates the CUDA sources of the kernels between a cache in e4m3, of heads of `head_dim`
/// features, and the workspace of prompts: that which writes the cache, then that which reads it.
pub fn e4m3_cache_sources(
    head_dim: usize,
    page_size: Option<usize>,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<[KernelSource; 2], CompilationError> {
    let cache = || CacheLengthsCompilationArg {
        slots: (),
        kv_heads: (),
        max_len: (),
        pages: (),
    };
    let target_of_cards = AttentionTarget {
        multiprocessors: 1,
        plane: Planes::NVIDIA.size,
        units: UNITS,
    };
    let config = CodesConfig::new(head_dim, page_size, &target_of_cards, true);
    let uses_pdl = pdl::is_supported_by(capability);
    let store = Store::new(
        settings(UNITS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        optional(page_size.is_some()),
        CodesLengthsCompilationArg {
            rows: (),
            cache: cache(),
        },
        config,
        uses_pdl,
        dtype.elem(),
    );
    let widen = Widen::new(
        settings(UNITS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        optional(page_size.is_some()),
        FlashLengthsCompilationArg {
            heads: (),
            group: (),
            cache: cache(),
            window: (),
        },
        config,
        uses_pdl,
        dtype.elem(),
    );
    Ok([
        cuda_text(&store, capability)?,
        cuda_text(&widen, capability)?,
    ])
}
