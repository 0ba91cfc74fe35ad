//! Rounding to nearest, with a search for the range of each group.

use crate::QuantError;
use crate::grid::{Grid, GroupFormat, expect_weight, in_form, range};
use marlin_format::layout::PlainLayout;
use marlin_format::{PlainParts, PlainWeight, QuantSpec, Scales, Sparsity, prune_two_four};
use rayon::prelude::*;
use std::borrow::Cow;

/// Quantises `weight` [K, N], row-major, by rounding every value to the nearest level of its group.
/// The range of a group's levels is chosen from [`SHRINKS`](crate::SHRINKS) parts of the whole
/// range, for a symmetric spec with either sign of the scale, to minimise the squared error of the
/// group. With 2:4 sparsity, the weight is pruned by magnitude first.
///
/// # Errors
/// The errors of [`marlin_format::quantize`].
pub fn round_with_clipping(
    weight: &[f32],
    k: usize,
    n: usize,
    spec: &QuantSpec,
    sparsity: Sparsity,
) -> Result<PlainWeight, QuantError> {
    expect_weight(weight, k, n)?;
    spec.check()?;
    let mut pruned = Cow::Borrowed(weight);
    if sparsity == Sparsity::TwoFour {
        prune_two_four(pruned.to_mut(), k, n)?;
    }
    let weight = &*pruned;
    let rows = spec.scales.group.rows(k);
    let format = GroupFormat::of(weight, spec);
    let grids: Vec<Grid> = (0..spec.scales.group.count(k) * n)
        .into_par_iter()
        .map(|index| {
            let (group, column) = (index / n, index % n);
            let values = || {
                weight[group * rows * n..]
                    .iter()
                    .skip(column)
                    .step_by(n)
                    .take(rows)
                    .copied()
            };
            let range = range(values());
            let whole = Grid::candidate(range, 0, &format);
            whole.check(group * rows, column, spec)?;
            let error = |grid: &Grid| {
                values()
                    .map(|value| f64::from(value - grid.nearest(value)).powi(2))
                    .sum::<f64>()
            };
            let (best, _) = (1..Grid::candidates(spec))
                .map(|index| Grid::candidate(range, index, &format))
                .map(|grid| (grid, error(&grid)))
                .fold((whole, error(&whole)), |best, found| {
                    if found.1 < best.1 { found } else { best }
                });
            Ok(best)
        })
        .collect::<Result<_, QuantError>>()?;
    let scales: Vec<f32> = grids.iter().map(|grid| grid.scale).collect();
    let weight = PlainWeight::new(PlainParts {
        k,
        n,
        spec: *spec,
        qweight: PlainLayout::new(k, n, spec.value).pack_with(|row, column| {
            grids[row / rows * n + column].q(weight[row * n + column]) as u8
        }),
        metadata: None,
        scales: Scales::from_f32(&scales, spec.scales.dtype),
        zero_points: spec
            .has_zero_points()
            .then(|| grids.iter().map(|grid| grid.zero as u8).collect()),
        row_permutation: None,
    })?;
    in_form(weight, sparsity)
}
