//! The scales of AWQ (arXiv 2306.00978).

use crate::gptq::FEWEST_TOKENS;
use crate::grid::{Grid, GroupFormat, expect_weight, range};
use crate::hessian::read;
use crate::product::product;
use crate::{HessianSums, QuantError};
use burn::tensor::{DType, Tensor, TensorData};
use marlin_format::QuantSpec;
use rayon::prelude::*;

#[cfg(test)]
mod tests;

/// The number of exponents that the search tries: 0, 0.05 and so on to 0.95.
const RATIOS: usize = 20;

/// The smallest size of a channel, as a part of the largest size. The limit keeps scales between
/// 1/100 and 100, and scaled weights in the range of f16.
const SMALLEST: f64 = 1e-4;

/// Finds the positive scale `s` of each input channel for which `diag(1/s) Q(diag(s) W)` is nearest
/// to `W` [K, N] in the metric of the second moments `sums`, where `Q` rounds to nearest in groups.
/// Layers with the same inputs are passed as one weight, with their columns side by side.
///
/// `channels`, `[K]`, is the channel of each input feature. Usually every feature has its own
/// channel. Features that must share one scale have the same channel, such as the features of query
/// heads that share a value head.
///
/// As in the paper, `s = m^ratio` for 20 ratios from 0 to 0.95, with the geometric mean of the
/// largest and the smallest scale divided out. The size `m` of a channel is the root mean square of
/// its features, instead of the paper's mean absolute value, because the root mean square follows
/// from the diagonal of the second moments. Channels that are always zero have the smallest scale,
/// so that their weights do not widen the range of a group. All channels have a scale of 1 if
/// scales do not reduce the error, or if `sums` has fewer than 128 tokens.
///
/// # Errors
/// The weight has another shape or values that are not finite; [`QuantError::Read`] if the device
/// fails.
///
/// # Panics
/// Panics if `channels` does not have K entries.
pub fn awq_scales(
    weight: &[f32],
    n: usize,
    sums: &HessianSums,
    channels: &[usize],
    spec: &QuantSpec,
) -> Result<Vec<f32>, QuantError> {
    let k = sums.features();
    assert_eq!(channels.len(), k, "channels of a layer of {k} features");
    expect_weight(weight, k, n)?;
    let sizes = sizes(&sums.diagonal()?, channels);
    let mut best = vec![1.0; sizes.len()];
    if sums.tokens() < FEWEST_TOKENS {
        return Ok(best);
    }
    let mut least = f64::INFINITY;
    for ratio in 0..RATIOS {
        let scales: Vec<f32> = sizes
            .iter()
            .map(|size| size.powf(ratio as f64 / RATIOS as f64) as f32)
            .collect();
        let rows: Vec<f32> = channels.iter().map(|&channel| scales[channel]).collect();
        let loss = loss(errors(weight, n, &rows, spec), n, sums)?;
        // The loss of a ratio whose groups overflow is not finite, so it is never the least.
        if loss < least {
            (best, least) = (scales, loss);
        }
    }
    Ok(best)
}

/// Returns the size of each channel, from the sums of squares `squares` [K] of its features,
/// divided by the geometric mean of the largest and the smallest size. A channel that is always
/// zero has the smallest size of the other channels.
fn sizes(squares: &[f64], channels: &[usize]) -> Vec<f64> {
    let mut sums = vec![(0.0, 0usize); channels.iter().max().map_or(0, |last| last + 1)];
    for (square, &channel) in squares.iter().zip(channels) {
        let (sum, count) = &mut sums[channel];
        (*sum, *count) = (*sum + square, *count + 1);
    }
    let sizes: Vec<f64> = sums
        .into_iter()
        .map(|(sum, count)| (sum / count.max(1) as f64).sqrt())
        .collect();
    let most = sizes.iter().copied().fold(0.0, f64::max);
    let at_least = |size: f64| size.max(SMALLEST * most);
    let least = at_least(
        sizes
            .iter()
            .copied()
            .filter(|&size| size > 0.0)
            .fold(most, f64::min),
    );
    let middle = (least * most).sqrt();
    if middle == 0.0 {
        return vec![1.0; sizes.len()];
    }
    sizes
        .into_iter()
        .map(|size| size.max(least) / middle)
        .collect()
}

/// Returns the errors `diag(1/scales) Q(diag(scales) W) - W`, [K, N].
fn errors(weight: &[f32], n: usize, scales: &[f32], spec: &QuantSpec) -> Vec<f32> {
    let rows = spec.scales.group.rows(scales.len());
    let mut errors = weight.to_vec();
    errors
        .par_chunks_mut(n)
        .zip(scales)
        .for_each(|(row, scale)| row.iter_mut().for_each(|value| *value *= scale));
    let format = GroupFormat::of(&errors, spec);
    errors
        .par_chunks_mut(rows * n)
        .zip(scales.par_chunks(rows))
        .for_each(|(group, scales)| {
            let grids: Vec<Grid> = (0..n)
                .map(|column| Grid::new(range(group[column..].iter().step_by(n).copied()), &format))
                .collect();
            for (row, scale) in group.chunks_exact_mut(n).zip(scales) {
                row.iter_mut()
                    .zip(&grids)
                    .for_each(|(value, grid)| *value = (grid.nearest(*value) - *value) / scale);
            }
        });
    errors
}

/// Returns the squared error of all outputs that the errors [K, N] of a weight cause.
fn loss(errors: Vec<f32>, n: usize, sums: &HessianSums) -> Result<f64, QuantError> {
    let errors = Tensor::<2>::from_data(
        TensorData::new(errors, [sums.features(), n]),
        (&sums.device(), DType::F32),
    );
    let columns = (product(sums.sum(), errors.clone()) * errors).sum_dim(0);
    Ok(read(columns)?.into_iter().map(f64::from).sum())
}
