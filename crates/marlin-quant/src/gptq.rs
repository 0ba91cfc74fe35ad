//! GPTQ (arXiv 2210.17323) with the changes of the Marlin paper, section 3.5.

use crate::factor::InverseFactor;
use crate::grid::{Grid, SHRINKS, expect_weight, range, shrink};
use crate::{Hessian, QuantError};
use marlin_format::layout::PlainLayout;
use marlin_format::{GroupSize, PlainParts, PlainWeight, QuantSpec, Scales};
use rayon::prelude::*;

/// Columns that a task takes: with 4096 input features their weights are 1 MiB.
const COLUMNS: usize = 64;
/// Most rows that are rounded before the rows after them take up their errors.
const BLOCK: usize = 128;

/// The order in which the input features of a layer are rounded: those that come last take up the errors of all others, and nothing takes up theirs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RowOrder {
    /// As they come.
    Natural,
    /// Act-order: features with the largest second moments first, and groups of features that follow each other in that order. The weight has a permutation,
    /// which activations go through at run time.
    ActOrder,
    /// Groups as they come, those with the largest second moments first, and so the features in each: nothing is permuted at run time.
    #[default]
    WithinGroups,
}

/// Options of [`gptq`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GptqOptions {
    /// The order in which features are rounded.
    pub order: RowOrder,
    /// The part of the mean of the Hessian's diagonal that is added to it; ten times as much, up to eight times over, where it has no Cholesky factor then.
    pub damping: f64,
}

impl Default for GptqOptions {
    /// Within groups, with a hundredth of the mean.
    fn default() -> Self {
        Self { order: RowOrder::default(), damping: 0.01 }
    }
}

/// A weight that GPTQ has quantised.
#[derive(Debug, Clone, PartialEq)]
pub struct Gptq {
    /// The weight.
    pub weight: PlainWeight,
    /// The squared error that is left of a token's outputs, all together, with the damping's part.
    pub loss: f64,
    /// The damping that was used.
    pub damping: f64,
    /// Input features that were zero in every token: their weights are rounded to nearest.
    pub dead: usize,
}

/// Quantises `weight` [K, N], row-major, for inputs with the second moments `hessian`.
///
/// Rows are rounded one after the other; the rows after a row change so that they take up as much of its error as they can (`factor.rs`). A group's range is
/// searched on the rows as the groups before have left them: of [`SHRINKS`] parts of it, for each column, the one that leaves the least squared error of the
/// outputs once the group's own rows and those after it have taken up what they can. A group of a whole column has its range from the squared error of its
/// rounded weights, each feature by its second moment.
///
/// The result is the same for any number of threads.
///
/// # Errors
/// A weight of another shape, or that has values that are no numbers; a scale that overflows its dtype; a Hessian without a Cholesky factor.
pub fn gptq(weight: &[f32], n: usize, hessian: &Hessian, spec: &QuantSpec, options: &GptqOptions) -> Result<Gptq, QuantError> {
    let k = hessian.features();
    expect_weight(weight, k, n)?;
    let diagonal = hessian.diagonal();
    let order = row_order(&diagonal, spec.group, options.order);
    let layer = Layer {
        n,
        spec: *spec,
        factor: InverseFactor::new(hessian, &order, options.damping)?,
        moments: order.iter().map(|&row| diagonal[row]).collect(),
        groups: groups(&order, spec.group, options.order),
        order,
    };
    let starts: Vec<usize> = (0..n).step_by(COLUMNS).collect();
    let parts: Vec<Columns> = starts.par_iter().map(|&first| layer.columns(weight, first)).collect::<Result<_, QuantError>>()?;
    let (dead, damping) = (diagonal.iter().filter(|&&moment| moment == 0.0).count(), layer.factor.damping);
    let loss = parts.iter().map(|part| part.loss).sum::<f64>() / hessian.tokens().max(1) as f64;
    Ok(Gptq { weight: layer.assemble(&parts, options.order)?, loss, damping, dead })
}

/// The features in the order in which they are rounded.
fn row_order(moments: &[f64], group: GroupSize, order: RowOrder) -> Vec<usize> {
    let largest_first = |rows: &mut [usize]| rows.sort_by(|&a, &b| moments[b].total_cmp(&moments[a]));
    let mut rows: Vec<usize> = (0..moments.len()).collect();
    match order {
        RowOrder::Natural => {}
        RowOrder::ActOrder => largest_first(&mut rows),
        RowOrder::WithinGroups => {
            let mut groups: Vec<&mut [usize]> = rows.chunks_mut(group.rows(moments.len())).collect();
            groups.iter_mut().for_each(|rows| largest_first(rows));
            let moment = |rows: &[usize]| rows.iter().map(|&row| moments[row]).sum::<f64>() / rows.len() as f64;
            groups.sort_by(|a, b| moment(b).total_cmp(&moment(a)));
            rows = groups.into_iter().flat_map(|rows| rows.iter().copied()).collect();
        }
    }
    rows
}

/// The groups in the order in which they are rounded: the index of each, and its place in `order`.
fn groups(order: &[usize], group: GroupSize, kind: RowOrder) -> Vec<(usize, std::ops::Range<usize>)> {
    let (k, rows) = (order.len(), group.rows(order.len()));
    let mut found = Vec::with_capacity(group.count(k));
    let mut start = 0;
    while start < k {
        let (index, len) = match kind {
            RowOrder::ActOrder => (start / rows, rows.min(k - start)),
            RowOrder::Natural | RowOrder::WithinGroups => {
                let index = order[start] / rows;
                (index, rows.min(k - index * rows))
            }
        };
        found.push((index, start..start + len));
        start += len;
    }
    found
}

/// What all columns share.
struct Layer {
    n: usize,
    spec: QuantSpec,
    factor: InverseFactor,
    /// The second moment of each feature, in the order in which they are rounded.
    moments: Vec<f64>,
    groups: Vec<(usize, std::ops::Range<usize>)>,
    /// The feature that is rounded at each place.
    order: Vec<usize>,
}

/// The outcome of some columns.
struct Columns {
    first: usize,
    count: usize,
    /// [K, count], in the order in which rows are rounded.
    q: Vec<u8>,
    /// [groups, count], by the index of the group.
    grids: Vec<Grid>,
    loss: f64,
}

impl Layer {
    /// Rounds the columns from `first` on.
    fn columns(&self, weight: &[f32], first: usize) -> Result<Columns, QuantError> {
        let (k, count) = (self.order.len(), COLUMNS.min(self.n - first));
        let mut rows: Vec<f32> = self.order.iter().flat_map(|&row| &weight[row * self.n + first..][..count]).copied().collect();
        let empty = Grid::new([0.0, 0.0], &self.spec);
        let mut found = Columns { first, count, q: vec![0; k * count], grids: vec![empty; self.groups.len() * count], loss: 0.0 };
        let mut errors = vec![0.0; BLOCK * count];
        for (index, places) in &self.groups {
            let grids = self.search(&rows, places.clone(), count);
            for (column, grid) in grids.iter().enumerate() {
                grid.check(self.order[places.start], first + column, &self.spec)?;
            }
            for start in places.clone().step_by(BLOCK) {
                let end = places.end.min(start + BLOCK);
                let block = &mut rows[start * count..end * count];
                let mut losses = vec![0.0; count];
                self.round(block, start, &grids, &mut losses, &mut errors);
                found.loss += losses.iter().map(|&loss| f64::from(loss)).sum::<f64>();
                for ((q, value), grid) in found.q[start * count..end * count].iter_mut().zip(block).zip(grids.iter().cycle()) {
                    *q = grid.q(*value) as u8;
                }
                let (_, after) = rows.split_at_mut(end * count);
                for (place, errors) in (start..end).zip(errors.chunks_exact(count)) {
                    let factors = &self.factor.row(place)[end - place..];
                    for (row, &factor) in after.chunks_exact_mut(count).zip(factors) {
                        row.iter_mut().zip(errors).for_each(|(value, error)| *value -= factor * error);
                    }
                }
            }
            found.grids[index * count..][..count].copy_from_slice(&grids);
        }
        Ok(found)
    }

    /// The grid of each column of a group.
    fn search(&self, rows: &[f32], places: std::ops::Range<usize>, count: usize) -> Vec<Grid> {
        let group = &rows[places.start * count..places.end * count];
        let ranges: Vec<[f32; 2]> = (0..count).map(|column| range(group.iter().skip(column).step_by(count).copied())).collect();
        let (mut best, mut least) = (Vec::new(), vec![f32::INFINITY; count]);
        let (mut block, mut errors) = (Vec::new(), vec![0.0; BLOCK * count]);
        for part in (0..SHRINKS).map(shrink) {
            let grids: Vec<Grid> = ranges.iter().map(|&[low, high]| Grid::new([low * part, high * part], &self.spec)).collect();
            let mut losses = vec![0.0; count];
            if places.len() <= BLOCK {
                block.clear();
                block.extend_from_slice(group);
                self.round(&mut block, places.start, &grids, &mut losses, &mut errors);
            } else {
                for (row, &moment) in group.chunks_exact(count).zip(&self.moments[places.clone()]) {
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

    /// Rounds a block of rows from place `start` on, each to its column's grid: in `rows` each ends as the value that was rounded, in `errors` are their errors by
    /// the diagonal of the factor, and `losses` grow by the squares of those.
    fn round(&self, rows: &mut [f32], start: usize, grids: &[Grid], losses: &mut [f32], errors: &mut [f32]) {
        let count = grids.len();
        for (i, errors) in errors.chunks_exact_mut(count).enumerate().take(rows.len() / count) {
            let (row, after) = rows[i * count..].split_at_mut(count);
            let factors = self.factor.row(start + i);
            // The outputs do not depend on a dead feature.
            let is_live = f32::from(u8::from(self.moments[start + i] > 0.0));
            for (((error, loss), &value), grid) in errors.iter_mut().zip(&mut *losses).zip(&*row).zip(grids) {
                *error = (value - grid.nearest(value)) / factors[0];
                *loss += is_live * *error * *error;
            }
            for (row, &factor) in after.chunks_exact_mut(count).zip(&factors[1..]) {
                row.iter_mut().zip(&*errors).for_each(|(value, error)| *value -= factor * error);
            }
        }
    }

    /// The weight of all columns.
    fn assemble(&self, parts: &[Columns], order: RowOrder) -> Result<PlainWeight, QuantError> {
        let (k, n, groups) = (self.order.len(), self.n, self.groups.len());
        let mut q = vec![0u8; k * n];
        let (mut scales, mut zeros) = (vec![0.0; groups * n], vec![0u8; groups * n]);
        for part in parts {
            for (place, row) in part.q.chunks_exact(part.count).enumerate() {
                let stored = if order == RowOrder::ActOrder { place } else { self.order[place] };
                q[stored * n + part.first..][..part.count].copy_from_slice(row);
            }
            for (group, grids) in part.grids.chunks_exact(part.count).enumerate() {
                for (column, grid) in grids.iter().enumerate() {
                    scales[group * n + part.first + column] = grid.scale;
                    zeros[group * n + part.first + column] = grid.zero as u8;
                }
            }
        }
        let permutation = (order == RowOrder::ActOrder).then(|| self.order.iter().map(|&row| row as u32).collect());
        Ok(PlainWeight::new(PlainParts {
            k,
            n,
            spec: self.spec,
            words: PlainLayout::new(k, n, self.spec.bits).pack_with(|row, column| q[row * n + column]),
            metadata: None,
            scales: Scales::from_f32(&scales, self.spec.scale_dtype),
            zero_points: self.spec.zero_points.then_some(zeros),
            row_permutation: permutation,
        })?)
    }
}
