//! The CUDA text of the kernel, without a device.

use super::AttentionConfig;
use super::kernel::{LengthsCompilationArg, attention::Attention};
use super::plan::Held;
use cubecl::CompilationError;
use cubecl::prelude::*;
use cubecl::std::FastDivmod;
use marlin_kernels::ActivationDtype;
use marlin_kernels::inspect::{Source, buffer, cuda_text, optional, properties, settings, target};

/// How CubeCL divides by a number that the host knows.
type Divmod = <FastDivmod<u32> as LaunchArg>::CompilationArg;

/// What CubeCL compiles for `config` on a card of compute capability `capability` (80 for 8.0).
pub fn source(config: &AttentionConfig, has_norm: bool, dtype: ActivationDtype, capability: u32) -> Result<Source, CompilationError> {
    let held = Held::words(dtype);
    let norm = || optional(has_norm);
    let kernel = Attention::new(
        settings(config.threads, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        norm(),
        norm(),
        buffer(),
        buffer(),
        buffer(),
        LengthsCompilationArg {
            heads: (),
            kv_heads: (),
            slots: (),
            max_len: (),
            window: (),
            shares: Divmod::Fast,
            share_least: (),
            share_most: (),
            epsilon: (),
        },
        held.size,
        *config,
        dtype.elem(),
        held.elem,
    );
    cuda_text(&kernel, capability)
}
