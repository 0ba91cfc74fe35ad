use marlin_kernels::ActivationDtype;

/// Returns the largest relative error that a correct kernel may have, by the dtype of its output.
///
/// Sums are in f32, so the error is the rounding of the output (at most 2^-11 relative for f16,
/// 2^-8 for bf16), and that of the weight if a backend's own matmul reads a weight that was
/// dequantised to that dtype.
pub const fn tolerance(dtype: ActivationDtype) -> f64 {
    match dtype {
        ActivationDtype::F32 => 1e-5,
        ActivationDtype::F16 => 1e-3,
        ActivationDtype::BF16 => 8e-3,
    }
}

/// Returns ||found - expected|| / ||magnitude||; infinite if a value is not finite or the lengths
/// differ.
///
/// `magnitude` is the magnitude of the terms of each output: the error of an output whose terms
/// cancel is relative to the terms, not to their small sum. For the usual relative error, pass
/// `expected`.
pub fn relative_error(found: &[f64], expected: &[f64], magnitude: &[f64]) -> f64 {
    if found.len() != expected.len() || found.iter().any(|value| !value.is_finite()) {
        return f64::INFINITY;
    }
    let difference: f64 = found
        .iter()
        .zip(expected)
        .map(|(found, expected)| (found - expected).powi(2))
        .sum();
    let norm: f64 = magnitude.iter().map(|value| value.powi(2)).sum();
    if norm == 0.0 {
        difference.sqrt()
    } else {
        (difference / norm).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unwritten_or_missing_value_is_an_infinite_error() {
        assert_eq!(
            relative_error(&[1.0, f64::NAN], &[1.0, 1.0], &[1.0, 1.0]),
            f64::INFINITY
        );
        assert_eq!(
            relative_error(&[1.0], &[1.0, 1.0], &[1.0, 1.0]),
            f64::INFINITY
        );
        assert!(
            (relative_error(&[1.0, 1.1], &[1.0, 1.0], &[1.0, 1.0]) - 0.1 / 2f64.sqrt()).abs()
                < 1e-12
        );
    }
}
