use marlin_kernels::ActivationDtype;

/// The largest relative error that a correct kernel may have, by the dtype of its output.
///
/// Sums are in f32, so the remaining error is the rounding of the output (2^-11 relative at most for f16, 2^-8 for bf16), and, where a backend's own
/// matmul reads a dequantised weight in that dtype, the rounding of the weight.
pub const fn tolerance(dtype: ActivationDtype) -> f64 {
    match dtype {
        ActivationDtype::F32 => 1e-5,
        ActivationDtype::F16 => 1e-3,
        ActivationDtype::BF16 => 8e-3,
    }
}

/// ||found - expected|| / ||magnitude||. A value that is not finite makes it infinite, and so does another length.
///
/// `magnitude` is the size of the terms of each output, so that an output which cancels to almost nothing is not held to more digits
/// than its terms have. For the plain relative error, pass `expected` itself.
pub fn relative_error(found: &[f64], expected: &[f64], magnitude: &[f64]) -> f64 {
    if found.len() != expected.len() || found.iter().any(|value| !value.is_finite()) {
        return f64::INFINITY;
    }
    let difference: f64 = found.iter().zip(expected).map(|(found, expected)| (found - expected).powi(2)).sum();
    let norm: f64 = magnitude.iter().map(|value| value.powi(2)).sum();
    if norm == 0.0 { difference.sqrt() } else { (difference / norm).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unwritten_or_missing_value_is_an_infinite_error() {
        assert_eq!(relative_error(&[1.0, f64::NAN], &[1.0, 1.0], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(relative_error(&[1.0], &[1.0, 1.0], &[1.0, 1.0]), f64::INFINITY);
        assert!((relative_error(&[1.0, 1.1], &[1.0, 1.0], &[1.0, 1.0]) - 0.1 / 2f64.sqrt()).abs() < 1e-12);
    }
}
