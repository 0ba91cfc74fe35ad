//! GPTQ's rounding on the host, in f32.

use super::{Layer, RowOrder};
use crate::QuantError;
use crate::factor::InverseFactor;
use crate::grid::{Grid, GroupFormat, is_two_four, range};
use marlin_format::{PlainWeight, Sparsity};
use rayon::prelude::*;

/// The number of columns in a task: with 4096 input features their weights are 1 MiB.
const COLUMNS: usize = 64;
/// The maximum number of rows that are rounded before the rows after them compensate for their
/// errors.
const BLOCK: usize = 128;

/// Rounds `target` [K, N], the corrected form of `weight`. Returns the quantised weight, and the
/// squared error that remains in all outputs, by output feature: `[N]`.
pub(super) fn round(
    layer: &Layer,
    factor: &InverseFactor,
    weight: &[f32],
    target: &[f32],
) -> Result<(PlainWeight, Vec<f64>), QuantError> {
    let (k, n, groups) = (layer.order.len(), layer.n, layer.groups.len());
    let rounder = Rounder {
        layer,
        factor,
        weight,
        format: GroupFormat::of(target, &layer.spec),
    };
    let starts: Vec<usize> = (0..n).step_by(COLUMNS).collect();
    let parts: Vec<Columns> = starts
        .par_iter()
        .map(|&first| rounder.columns(target, first))
        .collect::<Result<_, QuantError>>()?;
    let mut q = vec![0u8; k * n];
    let (mut scales, mut zeros) = (vec![0.0; groups * n], vec![0u8; groups * n]);
    for part in &parts {
        for (place, row) in part.q.chunks_exact(part.count).enumerate() {
            q[place * n + part.first..][..part.count].copy_from_slice(row);
        }
        for (group, grids) in part.grids.chunks_exact(part.count).enumerate() {
            for (column, grid) in grids.iter().enumerate() {
                scales[group * n + part.first + column] = grid.scale;
                zeros[group * n + part.first + column] = grid.zero as u8;
            }
        }
    }
    let losses = parts.into_iter().flat_map(|part| part.losses).collect();
    Ok((layer.assemble(&q, &scales, zeros)?, losses))
}

/// The result for some columns.
struct Columns {
    first: usize,
    count: usize,
    /// The codes [K, count], in the order in which rows are rounded.
    q: Vec<u8>,
    /// The grids [groups, count], by the index of the group.
    grids: Vec<Grid>,
    /// The loss of each column, `[count]`.
    losses: Vec<f64>,
}

/// A layer and the inverse factor that its rounding uses.
struct Rounder<'a> {
    layer: &'a Layer,
    factor: &'a InverseFactor,
    /// The original weight, [K, N].
    weight: &'a [f32],
    /// The format of the groups.
    format: GroupFormat,
}

impl Rounder<'_> {
    /// Rounds a task's columns of `target` [K, N], from column `first` on.
    fn columns(&self, target: &[f32], first: usize) -> Result<Columns, QuantError> {
        let Layer {
            n,
            spec,
            order,
            groups,
            ..
        } = self.layer;
        let (k, count) = (order.len(), COLUMNS.min(n - first));
        let mut rows: Vec<f32> = order
            .iter()
            .flat_map(|&row| &target[row * n + first..][..count])
            .copied()
            .collect();
        let mask = self.mask(first, count);
        let empty = Grid::new([0.0, 0.0], &self.format);
        let mut found = Columns {
            first,
            count,
            q: vec![0; k * count],
            grids: vec![empty; groups.len() * count],
            losses: vec![0.0; count],
        };
        let mut errors = vec![0.0; BLOCK * count];
        for (index, places) in groups {
            let grids = self.search(&rows, places.clone(), &mask);
            for (column, grid) in grids.iter().enumerate() {
                grid.check(order[places.start], first + column, spec)?;
            }
            for start in places.clone().step_by(BLOCK) {
                let end = places.end.min(start + BLOCK);
                let block = &mut rows[start * count..end * count];
                let mut losses = vec![0.0; count];
                self.round(block, start, &grids, &mask, &mut losses, &mut errors);
                found
                    .losses
                    .iter_mut()
                    .zip(&losses)
                    .for_each(|(sum, &loss)| *sum += f64::from(loss));
                for ((q, value), grid) in found.q[start * count..end * count]
                    .iter_mut()
                    .zip(block)
                    .zip(grids.iter().cycle())
                {
                    *q = grid.q(*value) as u8;
                }
                let (_, after) = rows.split_at_mut(end * count);
                for (place, errors) in (start..end).zip(errors.chunks_exact(count)) {
                    let factors = &self.factor.row(place)[end - place..];
                    for (row, &factor) in after.chunks_exact_mut(count).zip(factors) {
                        row.iter_mut()
                            .zip(errors)
                            .for_each(|(value, error)| *value -= factor * error);
                    }
                }
            }
            found.grids[index * count..][..count].copy_from_slice(&grids);
        }
        Ok(found)
    }

    /// Returns the mask of pruned weights for the columns from `first` on.
    fn mask(&self, first: usize, count: usize) -> Mask {
        let Layer {
            n, options, order, ..
        } = self.layer;
        let k = order.len();
        let is_zero = |row: usize, column: usize| self.weight[row * n + first + column] == 0.0;
        let held: Vec<bool> = (0..count)
            .map(|column| {
                options.order != RowOrder::ActOrder && is_two_four(|row| is_zero(row, column), k)
            })
            .collect();
        let zeros = match held.contains(&true) {
            true => order
                .iter()
                .flat_map(|&row| {
                    held.iter()
                        .enumerate()
                        .map(move |(column, held)| *held && is_zero(row, column))
                })
                .collect(),
            false => Vec::new(),
        };
        let is_searched = options.sparsity == Sparsity::TwoFour;
        Mask {
            searched: held.iter().map(|held| is_searched && !held).collect(),
            zeros,
        }
    }

    /// Returns the best grid of each column of a group, found by a search.
    fn search(&self, rows: &[f32], places: std::ops::Range<usize>, mask: &Mask) -> Vec<Grid> {
        let count = mask.searched.len();
        let group = &rows[places.start * count..places.end * count];
        let ranges: Vec<[f32; 2]> = (0..count)
            .map(|column| range(group.iter().skip(column).step_by(count).copied()))
            .collect();
        let (mut best, mut least) = (Vec::new(), vec![f32::INFINITY; count]);
        let (mut block, mut errors) = (Vec::new(), vec![0.0; BLOCK * count]);
        for index in 0..Grid::candidates(&self.layer.spec) {
            let grids: Vec<Grid> = ranges
                .iter()
                .map(|&range| Grid::candidate(range, index, &self.format))
                .collect();
            let mut losses = vec![0.0; count];
            if places.len() <= BLOCK {
                block.clear();
                block.extend_from_slice(group);
                self.round(
                    &mut block,
                    places.start,
                    &grids,
                    mask,
                    &mut losses,
                    &mut errors,
                );
            } else {
                for (row, &moment) in group
                    .chunks_exact(count)
                    .zip(&self.layer.moments[places.clone()])
                {
                    for ((loss, &value), grid) in losses.iter_mut().zip(row).zip(&grids) {
                        *loss += moment as f32 * (value - grid.nearest(value)).powi(2);
                    }
                }
            }
            if best.is_empty() {
                best.clone_from(&grids);
            }
            for (column, &loss) in losses.iter().enumerate() {
                if loss < least[column] {
                    (least[column], best[column]) = (loss, grids[column]);
                }
            }
        }
        best
    }

    /// Rounds a block of rows from place `start` on, each to its column's grid. Afterwards `rows`
    /// holds the values before rounding, with 0 for pruned ones, and `errors` holds their errors
    /// divided by the diagonal of the factor. The squares of these errors are added to `losses`.
    fn round(
        &self,
        rows: &mut [f32],
        start: usize,
        grids: &[Grid],
        mask: &Mask,
        losses: &mut [f32],
        errors: &mut [f32],
    ) {
        let count = grids.len();
        let mut pruned = vec![[false; 4]; count];
        for (i, errors) in errors
            .chunks_exact_mut(count)
            .enumerate()
            .take(rows.len() / count)
        {
            if i % 4 == 0 && mask.searched.contains(&true) {
                self.prune(
                    &rows[i * count..(i + 4) * count],
                    start + i,
                    mask,
                    &mut pruned,
                );
            }
            let (row, after) = rows[i * count..].split_at_mut(count);
            let factors = self.factor.row(start + i);
            // The outputs do not depend on a dead feature.
            let is_live = f32::from(u8::from(self.layer.moments[start + i] > 0.0));
            if mask.is_dense() {
                for (((error, loss), &value), grid) in
                    errors.iter_mut().zip(&mut *losses).zip(&*row).zip(grids)
                {
                    *error = (value - grid.nearest(value)) / factors[0];
                    *loss += is_live * *error * *error;
                }
            } else {
                for (column, value) in row.iter_mut().enumerate() {
                    let is_pruned = pruned[column][i % 4] || mask.is_held(start + i, column);
                    let level = if is_pruned {
                        0.0
                    } else {
                        grids[column].nearest(*value)
                    };
                    errors[column] = (*value - level) / factors[0];
                    losses[column] += is_live * errors[column] * errors[column];
                    if is_pruned {
                        *value = 0.0;
                    }
                }
            }
            for (row, &factor) in after.chunks_exact_mut(count).zip(&factors[1..]) {
                row.iter_mut()
                    .zip(&*errors)
                    .for_each(|(value, error)| *value -= factor * error);
            }
        }
    }

    /// Prunes two of the four rows from place `start` on in each column: the two whose pruning
    /// costs least, by SparseGPT's equation 3.
    fn prune(&self, rows: &[f32], start: usize, mask: &Mask, pruned: &mut [[bool; 4]]) {
        let count = mask.searched.len();
        let factors: [f32; 4] = std::array::from_fn(|i| self.factor.row(start + i)[0]);
        for (column, pruned) in pruned
            .iter_mut()
            .enumerate()
            .filter(|(column, _)| mask.searched[*column])
        {
            let costs: [f32; 4] =
                std::array::from_fn(|i| (rows[i * count + column] / factors[i]).abs());
            let mut places = [0, 1, 2, 3];
            places.sort_by(|&a, &b| costs[a].total_cmp(&costs[b]));
            *pruned = std::array::from_fn(|i| places[..2].contains(&i));
        }
    }
}

/// The pruned weights of some columns.
struct Mask {
    /// The columns in which pruned weights are chosen while the rows are rounded, `[count]`.
    searched: Vec<bool>,
    /// The zeros of columns that are already 2:4, [K, count], in the order in which rows are
    /// rounded; empty if there are no such columns.
    zeros: Vec<bool>,
}

impl Mask {
    fn is_dense(&self) -> bool {
        self.zeros.is_empty() && !self.searched.contains(&true)
    }

    fn is_held(&self, place: usize, column: usize) -> bool {
        self.zeros
            .get(place * self.searched.len() + column)
            .is_some_and(|&zero| zero)
    }
}
