//! The CUDA source of the kernel, generated without a device.

use super::kernel::flash::Flash;
use super::kernel::{FlashConfig, FlashLengthsCompilationArg, THREADS};
use cubecl::CompilationError;
use cubecl::prelude::*;
use marlin_kernels::ActivationDtype;
use marlin_kernels::inspect::{Source, buffer, cuda_text, properties, settings, target};

/// Generates the CUDA source for heads of `head_dim` features on a card of compute capability `capability` (80 for 8.0).
pub fn source(head_dim: usize, dtype: ActivationDtype, capability: u32) -> Result<Source, CompilationError> {
    let kernel = Flash::new(
        settings(THREADS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        buffer(),
        FlashLengthsCompilationArg { heads: (), kv_heads: (), group: (), slots: (), max_len: (), window: () },
        FlashConfig { head_dim, bf16: dtype == ActivationDtype::BF16 },
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
