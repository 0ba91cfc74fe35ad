//! The CUDA text of the kernel, without a device.

use super::AttentionConfig;
use super::kernel::{LengthsCompilationArg, attention::Attention};
use super::plan::Held;
use crate::ActivationDtype;
use crate::marlin::{Source, buffer, cuda_text, properties, settings, target};
use cubecl::prelude::*;
use cubecl::std::FastDivmod;
use cubecl_runtime::compiler::CompilationError;

/// How CubeCL divides by a number that the host knows.
type Divmod = <FastDivmod<u32> as LaunchArg>::CompilationArg;

/// What CubeCL compiles for `config` on a card of compute capability `capability` (80 for 8.0).
pub fn source(config: &AttentionConfig, has_norm: bool, dtype: ActivationDtype, capability: u32) -> Result<Source, CompilationError> {
    let held = Held::words(dtype);
    let norm = || if has_norm { ComptimeOptionCompilationArg::Some(buffer()) } else { ComptimeOptionCompilationArg::None };
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
