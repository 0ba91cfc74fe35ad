//! The CUDA source of the row-by-row kernels, generated without a device.

use super::glu::silu_mul_rows::SiluMulRows;
use super::norm::{cube_units, rms_norm_rows::RmsNormRows};
use cubecl::CompilationError;
use cubecl::prelude::*;
use marlin_kernels::ActivationDtype;
use marlin_kernels::inspect::{
    KernelSource, buffer, cuda_text, optional, properties, settings, target,
};
use marlin_kernels::pdl;
use marlin_kernels::planes::Planes;

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

/// Generates the CUDA source of SwiGLU.
pub fn silu_mul_source(
    dtype: ActivationDtype,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let kernel = SiluMulRows::new(
        settings(256, ExecutionMode::Checked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        (),
        16 / dtype.elem().size(),
        pdl::is_supported_by(capability),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
