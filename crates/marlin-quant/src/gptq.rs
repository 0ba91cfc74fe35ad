//! GPTQ (arXiv 2210.17323) with the changes of the Marlin paper, section 3.5, alone or with SparseGPT's choice of weights to prune (arXiv 2301.00774).

use crate::factor::InverseFactor;
use crate::grid::{Grid, SHRINKS, expect_weight, in_form, range, shrink};
use crate::quantizer::{Quantized, Quantizer};
use crate::{Hessian, QuantError, round_with_clipping};
use marlin_format::layout::PlainLayout;
use marlin_format::{FormatError, GroupSize, PlainParts, PlainWeight, QuantSpec, Scales, Sparsity};
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
    /// Groups as they come, those with the largest second moments first, and so the features in each, of a 2:4 weight four by four: nothing is permuted
    /// at run time.
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
    /// 2:4 prunes the weight while it is rounded (SparseGPT): of every four rows of a column the two stay whose loss would cost most, and the rows after them
    /// take up what the others did. Columns that are 2:4 already keep their zeros, whatever is asked.
    pub sparsity: Sparsity,
}

impl Default for GptqOptions {
    /// Dense, within groups, with a hundredth of the mean.
    fn default() -> Self {
        Self { order: RowOrder::default(), damping: 0.01, sparsity: Sparsity::Dense }
    }
}

/// A weight that GPTQ has quantised.
#[derive(Debug, Clone, PartialEq)]
pub struct Gptq {
    /// The weight.
    pub weight: PlainWeight,
    /// The squared error that is left of a token's outputs, with the damping's part, by output feature: `[N]`.
    pub losses: Vec<f64>,
    /// The damping that was used.
    pub damping: f64,
    /// Input features that were zero in every token: their weights are rounded to nearest.
    pub dead: usize,
}

/// Fewest tokens that GPTQ follows: with fewer, the second moments of most features are noise.
const FEWEST_TOKENS: usize = 128;

impl Quantizer for GptqOptions {
    /// [`gptq`]; [rounding with clipping](round_with_clipping), after pruning by magnitude where it is 2:4, for a layer that saw fewer than 128 tokens.
    fn quantize(&self, weight: &[f32], k: usize, n: usize, hessian: Option<&Hessian>, spec: &QuantSpec) -> Result<Quantized, QuantError> {
        if let Some(hessian) = hessian.filter(|hessian| hessian.tokens() >= FEWEST_TOKENS) {
            let Gptq { weight, losses, damping, dead } = gptq(weight, n, hessian, spec, self)?;
            return Ok(Quantized { weight, losses: Some(losses), damping: Some(damping), dead, fell_back: false });
        }
        let weight = round_with_clipping(weight, k, n, spec, self.sparsity)?;
        Ok(Quantized { fell_back: true, ..Quantized::rounded(weight) })
    }
}

impl Gptq {
    /// The squared error that is left of a token's outputs, all together.
    pub fn loss(&self) -> f64 {
        self.losses.iter().sum()
    }
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
/// A weight of another shape, or that has values that are no numbers; a scale that overflows its dtype; a Hessian without a Cholesky factor; a 2:4 weight with
/// act-order, or of a K that is no multiple of 4.
pub fn gptq(weight: &[f32], n: usize, hessian: &Hessian, spec: &QuantSpec, options: &GptqOptions) -> Result<Gptq, QuantError> {
    let k = hessian.features();
    expect_weight(weight, k, n)?;
    if options.sparsity == Sparsity::TwoFour {
        if options.order == RowOrder::ActOrder {
            return Err(FormatError::SparsePermuted.into());
        }
        if !k.is_multiple_of(4) {
            return Err(FormatError::SparseRows { k }.into());
        }
    }
    let diagonal = hessian.diagonal();
    let order = row_order(&diagonal, spec.group, options);
    let layer = Layer {
        n,
        spec: *spec,
        options: *options,
        factor: InverseFactor::new(hessian, &order, options.damping)?,
        moments: order.iter().map(|&row| diagonal[row]).collect(),
        groups: groups(&order, spec.group, options.order),
        order,
    };
    let starts: Vec<usize> = (0..n).step_by(COLUMNS).collect();
    let parts: Vec<Columns> = starts.par_iter().map(|&first| layer.columns(weight, first)).collect::<Result<_, QuantError>>()?;
    let (dead, damping) = (diagonal.iter().filter(|&&moment| moment == 0.0).count(), layer.factor.damping);
    let tokens = hessian.tokens().max(1) as f64;
    let losses = parts.iter().flat_map(|part| &part.losses).map(|loss| loss / tokens).collect();
    Ok(Gptq { weight: layer.assemble(&parts)?, losses, damping, dead })
}

/// The features in the order in which they are rounded.
fn row_order(moments: &[f64], group: GroupSize, options: &GptqOptions) -> Vec<usize> {
    let k = moments.len();
    let mean = |rows: &[usize]| rows.iter().map(|&row| moments[row]).sum::<f64>() / rows.len() as f64;
    // Parts of `rows` by their mean second moments, the largest first.
    let sorted = |rows: &[usize], part: usize| {
        let mut parts: Vec<&[usize]> = rows.chunks(part).collect();
        parts.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        parts.concat()
    };
    let rows: Vec<usize> = (0..k).collect();
    match options.order {
        RowOrder::Natural => rows,
        RowOrder::ActOrder => sorted(&rows, 1),
        RowOrder::WithinGroups => {
            // Of every four rows two are kept: the four stay together.
            let together = if options.sparsity == Sparsity::TwoFour { 4 } else { 1 };
            let group = group.rows(k);
            sorted(&rows, group).chunk_by(|&a, &b| a / group == b / group).flat_map(|rows| sorted(rows, together)).collect()
        }
    }
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
    options: GptqOptions,
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
    /// `[count]`.
    losses: Vec<f64>,
}

impl Layer {
    /// Rounds the columns from `first` on.
    fn columns(&self, weight: &[f32], first: usize) -> Result<Columns, QuantError> {
        let (k, count) = (self.order.len(), COLUMNS.min(self.n - first));
        let mut rows: Vec<f32> = self.order.iter().flat_map(|&row| &weight[row * self.n + first..][..count]).copied().collect();
        let mask = self.mask(weight, first, count);
        let empty = Grid::new([0.0, 0.0], &self.spec);
        let mut found =
            Columns { first, count, q: vec![0; k * count], grids: vec![empty; self.groups.len() * count], losses: vec![0.0; count] };
        let mut errors = vec![0.0; BLOCK * count];
        for (index, places) in &self.groups {
            let grids = self.search(&rows, places.clone(), &mask);
            for (column, grid) in grids.iter().enumerate() {
                grid.check(self.order[places.start], first + column, &self.spec)?;
            }
            for start in places.clone().step_by(BLOCK) {
                let end = places.end.min(start + BLOCK);
                let block = &mut rows[start * count..end * count];
                let mut losses = vec![0.0; count];
                self.round(block, start, &grids, &mask, &mut losses, &mut errors);
                found.losses.iter_mut().zip(&losses).for_each(|(sum, &loss)| *sum += f64::from(loss));
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

    /// What is pruned of the columns from `first` on.
    fn mask(&self, weight: &[f32], first: usize, count: usize) -> Mask {
        let k = self.order.len();
        let is_zero = |row: usize, column: usize| weight[row * self.n + first + column] == 0.0;
        let is_two_four = |column: usize| {
            let fits = |row: usize| (row..row + 4).filter(|&row| is_zero(row, column)).count() >= 2;
            self.options.order != RowOrder::ActOrder && k.is_multiple_of(4) && (0..k).step_by(4).all(fits)
        };
        let held: Vec<bool> = (0..count).map(is_two_four).collect();
        let zeros = match held.contains(&true) {
            true => self
                .order
                .iter()
                .flat_map(|&row| held.iter().enumerate().map(move |(column, held)| *held && is_zero(row, column)))
                .collect(),
            false => Vec::new(),
        };
        let is_searched = self.options.sparsity == Sparsity::TwoFour;
        Mask { searched: held.iter().map(|held| is_searched && !held).collect(), zeros }
    }

    /// The grid of each column of a group.
    fn search(&self, rows: &[f32], places: std::ops::Range<usize>, mask: &Mask) -> Vec<Grid> {
        let count = mask.searched.len();
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
                self.round(&mut block, places.start, &grids, mask, &mut losses, &mut errors);
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

    /// Rounds a block of rows from place `start` on, each to its column's grid: in `rows` each ends as the value that was rounded, or 0 where it is pruned, in
    /// `errors` are their errors by the diagonal of the factor, and `losses` grow by the squares of those.
    fn round(&self, rows: &mut [f32], start: usize, grids: &[Grid], mask: &Mask, losses: &mut [f32], errors: &mut [f32]) {
        let count = grids.len();
        let mut pruned = vec![[false; 4]; count];
        for (i, errors) in errors.chunks_exact_mut(count).enumerate().take(rows.len() / count) {
            if i % 4 == 0 && mask.searched.contains(&true) {
                self.prune(&rows[i * count..(i + 4) * count], start + i, mask, &mut pruned);
            }
            let (row, after) = rows[i * count..].split_at_mut(count);
            let factors = self.factor.row(start + i);
            // The outputs do not depend on a dead feature.
            let is_live = f32::from(u8::from(self.moments[start + i] > 0.0));
            if mask.is_dense() {
                for (((error, loss), &value), grid) in errors.iter_mut().zip(&mut *losses).zip(&*row).zip(grids) {
                    *error = (value - grid.nearest(value)) / factors[0];
                    *loss += is_live * *error * *error;
                }
            } else {
                for (column, value) in row.iter_mut().enumerate() {
                    let is_pruned = pruned[column][i % 4] || mask.is_held(start + i, column);
                    let level = if is_pruned { 0.0 } else { grids[column].nearest(*value) };
                    errors[column] = (*value - level) / factors[0];
                    losses[column] += is_live * errors[column] * errors[column];
                    if is_pruned {
                        *value = 0.0;
                    }
                }
            }
            for (row, &factor) in after.chunks_exact_mut(count).zip(&factors[1..]) {
                row.iter_mut().zip(&*errors).for_each(|(value, error)| *value -= factor * error);
            }
        }
    }

    /// Of four rows from place `start` on, the two of each column whose loss costs least: SparseGPT's equation 3.
    fn prune(&self, rows: &[f32], start: usize, mask: &Mask, pruned: &mut [[bool; 4]]) {
        let count = mask.searched.len();
        let factors: [f32; 4] = std::array::from_fn(|i| self.factor.row(start + i)[0]);
        for (column, pruned) in pruned.iter_mut().enumerate().filter(|(column, _)| mask.searched[*column]) {
            let costs: [f32; 4] = std::array::from_fn(|i| (rows[i * count + column] / factors[i]).abs());
            let mut places = [0, 1, 2, 3];
            places.sort_by(|&a, &b| costs[a].total_cmp(&costs[b]));
            *pruned = std::array::from_fn(|i| places[..2].contains(&i));
        }
    }

    /// The weight of all columns.
    fn assemble(&self, parts: &[Columns]) -> Result<PlainWeight, QuantError> {
        let (k, n, groups, order) = (self.order.len(), self.n, self.groups.len(), self.options.order);
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
        let weight = PlainWeight::new(PlainParts {
            k,
            n,
            spec: self.spec,
            words: PlainLayout::new(k, n, self.spec.bits).pack_with(|row, column| q[row * n + column]),
            metadata: None,
            scales: Scales::from_f32(&scales, self.spec.scale_dtype),
            zero_points: self.spec.zero_points.then_some(zeros),
            row_permutation: permutation,
        })?;
        in_form(weight, self.options.sparsity)
    }
}

/// The weights of some columns that are pruned.
struct Mask {
    /// The columns in which they are chosen as the rows are rounded, `[count]`.
    searched: Vec<bool>,
    /// Those of columns that are 2:4 already, [K, count] in the order in which rows are rounded; empty where there are none.
    zeros: Vec<bool>,
}

impl Mask {
    fn is_dense(&self) -> bool {
        self.zeros.is_empty() && !self.searched.contains(&true)
    }

    fn is_held(&self, place: usize, column: usize) -> bool {
        self.zeros.get(place * self.searched.len() + column).is_some_and(|&zero| zero)
    }
}
