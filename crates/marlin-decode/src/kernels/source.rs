//! The CUDA text of the kernels that work row by row, without a device.

use super::glu::silu_mul_rows::SiluMulRows;
use super::norm::{cube_units, rms_norm_rows::RmsNormRows};
use cubecl::CompilationError;
use cubecl::prelude::*;
use marlin_kernels::ActivationDtype;
use marlin_kernels::inspect::{Source, buffer, cuda_text, optional, properties, settings, target};
use marlin_kernels::planes::Planes;

/// The CUDA text of RMSNorm of rows of `features` values, the sum with the residual included.
pub fn rms_norm_source(features: usize, dtype: ActivationDtype, capability: u32) -> Result<Source, CompilationError> {
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
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}

/// The CUDA text of SiLU of the gates times the ups.
pub fn silu_mul_source(dtype: ActivationDtype, capability: u32) -> Result<Source, CompilationError> {
    let kernel = SiluMulRows::new(
        settings(256, ExecutionMode::Checked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        (),
        16 / dtype.elem().size(),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
