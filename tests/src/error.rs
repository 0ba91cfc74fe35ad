use marlin_kernels::ActivationDtype;

/// Returns the largest relative error that a correct kernel may have, by the dtype of its output.
///
/// Sums are in f32, so the error is the rounding of the output (at most 2^-11 relative for f16,
/// 2^-8 for bf16). The rounding of the weight is added if a backend's own matmul reads a weight
/// that was dequantised to the same dtype.
pub const fn tolerance(dtype: ActivationDtype) -> f64 {
    match dtype {
        ActivationDtype::F32 => 1e-5,
        ActivationDtype::F16 => 1e-3,
        ActivationDtype::BF16 => 8e-3,
    }
}
