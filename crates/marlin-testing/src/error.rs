/// Returns ||found - expected|| / ||expected||; infinite if a value is not finite or the numbers of
/// values differ.
pub fn relative_error<F, E>(found: &[F], expected: &[E]) -> f64
where
    F: Copy + Into<f64>,
    E: Copy + Into<f64>,
{
    let found: Vec<f64> = found.iter().map(|&value| value.into()).collect();
    let expected: Vec<f64> = expected.iter().map(|&value| value.into()).collect();
    relative_error_of_terms(&found, &expected, &expected)
}

/// Returns ||found - expected|| / ||magnitude||; infinite if a value is not finite or the numbers
/// of values differ.
///
/// `magnitude` is the magnitude of the terms of each output: the error of an output whose terms
/// cancel is relative to the terms, not to their small sum.
pub fn relative_error_of_terms(found: &[f64], expected: &[f64], magnitude: &[f64]) -> f64 {
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
        assert_eq!(relative_error(&[1.0, f64::NAN], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(relative_error(&[1.0], &[1.0, 1.0]), f64::INFINITY);
    }

    #[test]
    fn an_error_is_relative_to_the_norm() {
        let error = relative_error(&[1.0f32, 2.0], &[1.0, 1.0]);
        assert!((error - 0.5f64.sqrt()).abs() < 1e-12, "{error}");
        let of_terms = relative_error_of_terms(&[1.0, 1.1], &[1.0, 1.0], &[1.0, 1.0]);
        assert!((of_terms - 0.1 / 2f64.sqrt()).abs() < 1e-12, "{of_terms}");
    }
}
