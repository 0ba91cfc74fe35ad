use std::ops::RangeInclusive;

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

/// Checks that `found` is in the range of values that were measured over many seeds, widened by 5 %
/// of its bounds at both ends. `what` names the figure in the output and in the message.
///
/// # Panics
/// Panics if it is not: the code under test has become worse, or better, in which case the range is
/// measured again.
#[track_caller]
pub fn expect_measured(what: &str, found: f64, measured: RangeInclusive<f64>) {
    println!("{what}: {found:.4}");
    let (low, high) = (measured.start(), measured.end());
    assert!(
        (low - 0.05 * low.abs()..=high + 0.05 * high.abs()).contains(&found),
        "{what}: {found:.4}, where {low} to {high} were measured"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_may_leave_the_measured_range_by_five_percent() {
        expect_measured("in the range", 0.3, 0.2..=0.4);
        expect_measured("just above", 0.419, 0.2..=0.4);
        expect_measured("just below", -0.209, -0.2..=0.4);
        for outside in [0.421, 0.189, f64::NAN] {
            let is_refused = std::panic::catch_unwind(|| {
                expect_measured("outside", outside, 0.2..=0.4);
            });
            assert!(is_refused.is_err(), "{outside}");
        }
    }

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
