//! The CUDA text of the kernel, without a device.

use super::config::{Config, THREADS};
use super::kernel::{LengthsCompilationArg, norm_matmul::NormMatmul};
use crate::ActivationDtype;
use crate::marlin::{Source, buffer, cuda_text, properties, settings, target};
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// What CubeCL compiles for `config` on a card of compute capability `capability` (90 for 9.0).
pub fn source(config: &Config, capability: u32) -> Result<Source, CompilationError> {
    let dtype = if config.bf16 { ActivationDtype::BF16 } else { ActivationDtype::F16 };
    let kernel = NormMatmul::new(
        settings(THREADS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        if config.zero_points { ComptimeOptionCompilationArg::Some(buffer()) } else { ComptimeOptionCompilationArg::None },
        ComptimeOptionCompilationArg::Some(buffer()),
        buffer(),
        (),
        LengthsCompilationArg { n: (), k: (), tiles_n: (), tiles_k: (), groups: (), low_nibbles: (), high_nibbles: () },
        *config,
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
