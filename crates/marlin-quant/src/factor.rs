//! The triangular factor of the inverse of a Hessian.

use crate::{Hessian, QuantError};
use rayon::prelude::*;

/// The number of times that damping may grow by a factor of ten after a failed factorisation.
pub(crate) const ATTEMPTS: i32 = 8;

/// The upper triangular `U` [K, K] with `H⁻¹ = Uᵀ U`, for a Hessian with reordered features.
///
/// Row `i` of `U` gives the effect of an error of feature `i` on each later feature `j`. The weight
/// of feature `j` changes by `error * U[i][j] / U[i][i]`, and the smallest squared error that then
/// remains is `(error / U[i][i])²`.
pub(crate) struct InverseFactor {
    features: usize,
    rows: Vec<f32>,
    /// The damping that was used: the part of the mean of the diagonal that was added to the
    /// diagonal.
    pub damping: f64,
}

impl InverseFactor {
    /// Factorises the Hessian with its features in `order`. The part `damping` of the diagonal's
    /// mean is added to the diagonal, and ten times as much after each failed attempt. Features
    /// that are always zero are not counted in the mean, and are treated as independent of the
    /// others.
    pub fn new(hessian: &Hessian, order: &[usize], damping: f64) -> Result<Self, QuantError> {
        let k = order.len();
        let diagonal = hessian.diagonal();
        let live = diagonal
            .iter()
            .filter(|&&square| square > 0.0)
            .count()
            .max(1);
        let mean = diagonal.iter().sum::<f64>() / live as f64;
        let mut tried = damping;
        for attempt in 0..=ATTEMPTS {
            tried = damping.max(f64::EPSILON) * 10f64.powi(attempt);
            let entry = |i: usize, j: usize| {
                let (row, column) = (order[i], order[j]);
                match (diagonal[row] > 0.0, diagonal[column] > 0.0) {
                    (true, true) => {
                        hessian.get(row, column) + if i == j { tried * mean } else { 0.0 }
                    }
                    _ => f64::from(u8::from(i == j)),
                }
            };
            if let Some(factor) = upper_factor(k, &entry) {
                return Ok(Self {
                    features: k,
                    rows: inverse(k, &factor),
                    damping: tried,
                });
            }
            tracing::debug!(
                damping = tried,
                "a Hessian has no Cholesky factor; damping grows"
            );
        }
        Err(QuantError::NoFactor { k, damping: tried })
    }

    /// Returns the entries of row `i` from the diagonal on.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.rows[i * self.features + i..(i + 1) * self.features]
    }

    /// Returns `H⁻¹ right`, for `right` [K, N] in the order of the features.
    pub fn solve(&self, right: &[f32], n: usize) -> Vec<f32> {
        let k = self.features;
        let mut half = vec![0.0f32; k * n];
        half.par_chunks_exact_mut(n)
            .enumerate()
            .for_each(|(i, sums)| {
                for (&factor, right) in self.row(i).iter().zip(right[i * n..].chunks_exact(n)) {
                    sums.iter_mut()
                        .zip(right)
                        .for_each(|(sum, value)| *sum += factor * value);
                }
            });
        let mut solved = vec![0.0f32; k * n];
        solved
            .par_chunks_exact_mut(n)
            .enumerate()
            .for_each(|(i, sums)| {
                for (j, half) in half.chunks_exact(n).enumerate().take(i + 1) {
                    let factor = self.row(j)[i - j];
                    sums.iter_mut()
                        .zip(half)
                        .for_each(|(sum, value)| *sum += factor * value);
                }
            });
        solved
    }
}

/// Returns the upper triangular `R` with `H = R Rᵀ`, row-major, by a Cholesky factorisation that
/// begins with the last feature. Returns `None` if `H` is not positive definite.
pub(crate) fn upper_factor(
    k: usize,
    entry: &(impl Fn(usize, usize) -> f64 + Sync),
) -> Option<Vec<f64>> {
    let mut factor = vec![0.0; k * k];
    for j in (0..k).rev() {
        let (above, from_j) = factor.split_at_mut(j * k);
        let row_j = &mut from_j[..k];
        let square = entry(j, j)
            - row_j[j + 1..]
                .iter()
                .map(|value| value * value)
                .sum::<f64>();
        if !(square > 0.0 && square.is_finite()) {
            return None;
        }
        let root = square.sqrt();
        row_j[j] = root;
        let tail = &row_j[j + 1..];
        // A task for few rows costs more time than it saves, so one thread factorises each block of
        // the device's factorisation.
        above
            .par_chunks_exact_mut(k)
            .enumerate()
            .with_min_len(256)
            .for_each(|(i, row_i)| {
                let product: f64 = row_i[j + 1..].iter().zip(tail).map(|(a, b)| a * b).sum();
                row_i[j] = (entry(i, j) - product) / root;
            });
    }
    Some(factor)
}

/// Returns the inverse of an upper triangular matrix in f32. Rows are computed from the last to the
/// first, each as a combination of the rows after it.
pub(crate) fn inverse(k: usize, factor: &[f64]) -> Vec<f32> {
    let mut inverse = vec![0.0f64; k * k];
    for i in (0..k).rev() {
        let (above, after) = inverse.split_at_mut((i + 1) * k);
        let row = &mut above[i * k..];
        let factor = &factor[i * k..(i + 1) * k];
        // Columns are independent: each thread computes some of them.
        row[i + 1..]
            .par_chunks_mut(256)
            .enumerate()
            .for_each(|(part, columns)| {
                let start = i + 1 + part * 256;
                for (l, &weight) in factor
                    .iter()
                    .enumerate()
                    .take(start + columns.len())
                    .skip(i + 1)
                {
                    let other = &after[(l - i - 1) * k + start..][..columns.len()];
                    columns
                        .iter_mut()
                        .zip(other)
                        .for_each(|(sum, value)| *sum -= weight * value);
                }
                columns.iter_mut().for_each(|sum| *sum /= factor[i]);
            });
        row[i] = 1.0 / factor[i];
    }
    inverse.into_iter().map(|value| value as f32).collect()
}
