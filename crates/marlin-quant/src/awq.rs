//! The scales of AWQ (arXiv 2306.00978).

use crate::gptq::FEWEST_TOKENS;
use crate::grid::{Grid, expect_weight, range};
use crate::hessian::read;
use crate::product::product;
use crate::{HessianSums, QuantError};
use burn::tensor::{DType, Tensor, TensorData};
use marlin_format::QuantSpec;
use rayon::prelude::*;

#[cfg(test)]
mod tests;

/// Exponents that the search tries: 0, 0.05 and so on to 0.95.
const RATIOS: usize = 20;

/// A channel counts as at least this part of the largest: scales stay between 1/100 and 100, and
/// scaled weights in the range of f16.
const SMALLEST: f64 = 1e-4;

/// The positive scale `s` of each channel that inputs come from with which `diag(1/s) Q(diag(s) W)`
/// is nearest to `W` [K, N] in the metric of the second moments `sums`, where `Q` rounds to nearest
/// in groups. Layers that have the same inputs are one weight, side by side.
///
/// `channels`, `[K]`, is the channel of each input feature: its own where each has one, the same
/// where several features are one channel, such as those of query heads that share a value head,
/// and have to have one scale.
///
/// As in the paper, `s = m^ratio` for 20 ratios from 0 to 0.95, with the geometric mean of the
/// largest and the smallest scale divided out. The size `m` of a channel is the root of its
/// features' mean square, in place of the paper's mean absolute value: the diagonal of the second
/// moments has it. Channels that are always zero have the smallest scale, so that their weights
/// widen no group's range. All have a scale of 1 where nothing is gained, or where fewer than 128
/// tokens were seen.
///
/// # Errors
/// A weight of another shape, or that has values that are no numbers; [`QuantError::Read`] where
/// the device fails.
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
        // One whose groups overflow has none.
        if loss < least {
            (best, least) = (scales, loss);
        }
    }
    Ok(best)
}

/// The size of each channel by the sums of squares `squares` [K] of its features, over the
/// geometric mean of the largest and the smallest; one that is always zero counts as the smallest
/// of the others.
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

/// `diag(1/scales) Q(diag(scales) W) - W`, [K, N].
fn errors(weight: &[f32], n: usize, scales: &[f32], spec: &QuantSpec) -> Vec<f32> {
    let rows = spec.group.rows(scales.len());
    let mut errors = weight.to_vec();
    errors
        .par_chunks_mut(rows * n)
        .zip(scales.par_chunks(rows))
        .for_each(|(group, scales)| {
            for (row, scale) in group.chunks_exact_mut(n).zip(scales) {
                row.iter_mut().for_each(|value| *value *= scale);
            }
            let grids: Vec<Grid> = (0..n)
                .map(|column| Grid::new(range(group[column..].iter().step_by(n).copied()), spec))
                .collect();
            for (row, scale) in group.chunks_exact_mut(n).zip(scales) {
                row.iter_mut()
                    .zip(&grids)
                    .for_each(|(value, grid)| *value = (grid.nearest(*value) - *value) / scale);
            }
        });
    errors
}

/// The squared error of all outputs, of the errors [K, N] of a weight.
fn loss(errors: Vec<f32>, n: usize, sums: &HessianSums) -> Result<f64, QuantError> {
    let errors = Tensor::<2>::from_data(
        TensorData::new(errors, [sums.features(), n]),
        (&sums.device(), DType::F32),
    );
    let columns = (product(sums.sum(), errors.clone()) * errors).sum_dim(0);
    Ok(read(columns)?.into_iter().map(f64::from).sum())
}
