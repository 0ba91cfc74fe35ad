//! The CUDA text of the kernels that work row by row, without a device.

use super::glu::silu_mul_rows::SiluMulRows;
use super::head;
use super::norm::{cube_units, rms_norm_rows::RmsNormRows};
use super::planes::Planes;
use crate::ActivationDtype;
use crate::marlin::{Source, buffer, cuda_text, properties, settings, target};
use cubecl::prelude::*;
use cubecl_runtime::compiler::CompilationError;

/// What CubeCL compiles for RMSNorm of rows of `features` values, the sum with the residual included.
pub fn rms_norm_source(features: usize, dtype: ActivationDtype, capability: u32) -> Result<Source, CompilationError> {
    let size = 16 / dtype.elem().size();
    let vectors = features / size;
    let units = cube_units(vectors, Planes::NVIDIA, 1024);
    let kernel = RmsNormRows::new(
        settings(units, ExecutionMode::Checked),
        properties(capability),
        target(),
        buffer(),
        ComptimeOptionCompilationArg::Some(buffer()),
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

/// What CubeCL compiles for SiLU of the gates times the ups.
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

/// What CubeCL compiles for the head's product of `rows` rows of f16 or bf16 with a weight of `features` input features, a multiple of 32.
pub fn head_source(rows: usize, features: usize, dtype: ActivationDtype, capability: u32) -> Result<Source, CompilationError> {
    let kernel = head::tensor_cores::head::Head::new(
        settings(32 * head::tensor_cores::WARPS, ExecutionMode::Unchecked),
        properties(capability),
        target(),
        buffer(),
        buffer(),
        buffer(),
        (),
        (),
        head::tensor_cores::Config::new(rows, features, dtype),
        dtype.elem(),
    );
    cuda_text(&kernel, capability)
}
