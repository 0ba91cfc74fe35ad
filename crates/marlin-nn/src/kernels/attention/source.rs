//! The CUDA source of the kernel, generated without a device.

use super::AttentionConfig;
use super::block::AttentionSizesCompilationArg;
use super::config::KeyValueType;
use super::kernel::attention::Attention;
use crate::cache::CacheLengthsCompilationArg;
use cubecl::CompilationError;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;
use marlin_kernels::ActivationDtype;
use marlin_kernels::inspect::{
    KernelSource, buffer, cuda_text, optional, properties, settings, target,
};
use marlin_kernels::pdl;

/// The compile-time argument of a divisor that the host precomputes for CubeCL.
type Divmod = <FastDivmod<u32> as LaunchArg>::CompilationArg;

/// Generates the CUDA source for `config` on a card of compute capability `capability` (80 for
/// 8.0).
pub fn source(
    config: &AttentionConfig,
    has_norm: bool,
    has_sinks: bool,
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let held = KeyValueType::on_cuda(dtype, config.format);
    let norm = || optional(has_norm);
    let kernel = Attention::new(
        settings(config.threads, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        optional(config.page_size.is_some()),
        buffer(),
        buffer(),
        norm(),
        norm(),
        optional(has_sinks),
        buffer(),
        buffer(),
        buffer(),
        AttentionSizesCompilationArg {
            heads: (),
            cache: CacheLengthsCompilationArg {
                slots: (),
                kv_heads: (),
                max_len: (),
                pages: (),
            },
            window: (),
            splits: Divmod::Fast,
            split_least: (),
            split_most: (),
            epsilon: (),
        },
        held.size,
        AttentionConfig {
            uses_pdl: pdl::is_supported_by(capability),
            ..*config
        },
        dtype.elem(),
        held.elem,
    );
    cuda_text(&kernel, capability)
}
