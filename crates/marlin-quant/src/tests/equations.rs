//! Comparison of GPTQ's codes with those of the paper's equations.

use super::{SPECS, hessian, random, rng};
use crate::{GptqOptions, Hessian, RowOrder, gptq};
use marlin_format::PlainWeight;

/// Inverts a matrix by Gauss-Jordan elimination.
fn inverse(k: usize, mut matrix: Vec<f64>) -> Vec<f64> {
    let mut inverse: Vec<f64> = (0..k * k)
        .map(|i| f64::from(u8::from(i / k == i % k)))
        .collect();
    for pivot in 0..k {
        let value = matrix[pivot * k + pivot];
        for column in 0..k {
            matrix[pivot * k + column] /= value;
            inverse[pivot * k + column] /= value;
        }
        for row in (0..k).filter(|&row| row != pivot) {
            let factor = matrix[row * k + pivot];
            for column in 0..k {
                matrix[row * k + column] -= factor * matrix[pivot * k + column];
                inverse[row * k + column] -= factor * inverse[pivot * k + column];
            }
        }
    }
    inverse
}

/// Evaluates GPTQ's equations 2 and 3 literally, one feature after the other with a shrinking
/// inverse, on the grids of a weight that was quantised in natural order.
fn reference(weight: &[f32], hessian: &Hessian, damping: f64, found: &PlainWeight) -> Vec<u8> {
    let (k, n, spec) = (found.k(), found.n(), found.spec());
    let mean = hessian.diagonal().iter().sum::<f64>() / k as f64;
    let damped = (0..k * k)
        .map(|i| hessian.get(i / k, i % k) + if i / k == i % k { damping * mean } else { 0.0 })
        .collect();
    let mut inverse = inverse(k, damped);
    let mut rows: Vec<f64> = weight.iter().copied().map(f64::from).collect();
    let mut codes = Vec::with_capacity(k * n);
    for i in 0..k {
        let diagonal = inverse[i * k + i];
        for column in 0..n {
            let group = i / spec.scales.group.rows(k) * n + column;
            let scale = f64::from(found.scales().get(group));
            let zero = f64::from(
                found
                    .zero_points()
                    .map_or(spec.value.midpoint(), |zeros| zeros[group]),
            );
            let q = ((rows[i * n + column] / scale).round_ties_even() + zero)
                .clamp(0.0, f64::from(spec.value.max()));
            codes.push(q as u8);
            let error = (rows[i * n + column] - (q - zero) * scale) / diagonal;
            for j in i + 1..k {
                rows[j * n + column] -= error * inverse[j * k + i];
            }
        }
        let column: Vec<f64> = (0..k).map(|j| inverse[j * k + i]).collect();
        for a in i + 1..k {
            for b in i + 1..k {
                inverse[a * k + b] -= column[a] * column[b] / diagonal;
            }
        }
    }
    codes
}

#[test]
fn codes_are_those_of_the_equations() {
    let mut rng = rng();
    for spec in SPECS {
        for [k, n] in [[160, 70], [64, 3], [33, 9]] {
            let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
            let options = GptqOptions {
                order: RowOrder::Natural,
                ..GptqOptions::default()
            };
            let found = gptq(&weight, n, &hessian, &spec, &options).unwrap();
            let expected = reference(&weight, &hessian, found.damping, &found.weight);
            let differ = (0..k * n)
                .filter(|i| found.weight.q(i / n, i % n) != expected[*i])
                .count();
            // Occasionally f32 rounds a value midway between two levels to the other level, and the
            // values after it differ as well.
            assert!(
                differ * 50 <= k * n,
                "{spec} [{k}, {n}]: {differ} of {} codes differ",
                k * n
            );
        }
    }
}
