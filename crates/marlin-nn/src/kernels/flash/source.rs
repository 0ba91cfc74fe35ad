//! The CUDA source of the kernels, generated without a device.

use super::config::{FlashConfig, FlashLengthsCompilationArg};
use super::{mma_sync, wgmma};
use crate::cache::CacheLengthsCompilationArg;
use cubecl::CompilationError;
use cubecl::prelude::*;
use marlin_kernels::ActivationDtype;
use marlin_kernels::device::WGMMA_CAPABILITY;
use marlin_kernels::inspect::{
    KernelSource, buffer, cuda_text, optional, properties, settings, target,
};
use marlin_kernels::pdl;

/// Generates the CUDA source for heads of `head_dim` features on a card of compute capability
/// `capability` (80 for 8.0). `page_size` is the number of positions of a page of the cache, if it
/// has pages.
pub fn source(
    head_dim: usize,
    page_size: Option<usize>,
    has_sinks: bool,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let lengths = FlashLengthsCompilationArg {
        heads: (),
        group: (),
        cache: CacheLengthsCompilationArg {
            slots: (),
            kv_heads: (),
            max_len: (),
            pages: (),
        },
        window: (),
    };
    let config = FlashConfig {
        head_dim,
        bf16: dtype == ActivationDtype::BF16,
        page_size,
    };
    if capability == WGMMA_CAPABILITY {
        let kernel = wgmma::flash_wgmma::FlashWgmma::new(
            settings(wgmma::THREADS, ExecutionMode::Unchecked),
            properties(capability),
            target(),
            (),
            (),
            (),
            buffer(),
            buffer(),
            optional(page_size.is_some()),
            optional(has_sinks),
            buffer(),
            lengths,
            config,
            dtype.elem(),
        );
        return cuda_text(&kernel, capability);
    }
    let kernel = mma_sync::flash::Flash::new(
        settings(mma_sync::THREADS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        optional(page_size.is_some()),
        optional(has_sinks),
        buffer(),
        lengths,
        config,
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
