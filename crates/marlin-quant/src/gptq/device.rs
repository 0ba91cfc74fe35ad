//! GPTQ on a CubeCL device. The factor is computed in blocks by Burn's matmuls, with the diagonal
//! blocks on the host; rows are rounded by kernels.

mod factor;

use self::factor::inverse_factor;
use super::kernel::{Levels, MAX_ROWS, STEP};
use super::op::RoundingBackend;
use super::{Gptq, GptqOptions, Layer, per_token};
use crate::device::rounds;
use crate::grid::has_two_four;
use crate::hessian::read;
use crate::product::{PANEL, panels, product};
use crate::{HessianSums, QuantError};
use burn::backend::Dispatch;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData, s};
use marlin_format::QuantSpec;
use rayon::prelude::*;

/// The number of rows that are enough to see that most weights have no 2:4 columns.
const FIRST_ROWS: usize = 32;

/// Runs [`gptq_beside`](super::gptq_beside) for a weight in f32 on the device of the sums. Also
/// returns the quantised values on that device, f32 [K, N].
///
/// Returns `None` for the cases that the host handles: a device that does not round weights,
/// floats, a weight of another shape or with 2:4 columns, and a weight that is not finite or a
/// scale that overflows, whose position the host reports.
pub(super) fn gptq(
    weight: Tensor<2>,
    sums: &HessianSums,
    spec: &QuantSpec,
    options: &GptqOptions,
) -> Result<Option<(Gptq, Tensor<2>)>, QuantError> {
    let (device, [k, n]) = (sums.device(), weight.dims());
    if !rounds(&device)
        || spec.value.is_float()
        || k != sums.features()
        || n == 0
        || !is_finite(&weight)?
        || has_two_four_columns(&weight)?
    {
        return Ok(None);
    }
    let layer = Layer::new(&sums.diagonal()?, n, spec, options)?;
    let order: Vec<i32> = layer.order.iter().map(|&row| row as i32).collect();
    let order = Tensor::<1, Int>::from_data(TensorData::new(order, [k]), (&device, DType::I32));
    let (factor, damping) = inverse_factor(&sums.sum(), &order, &layer, options.damping)?;
    let mut rows = weight.clone().select(0, order.clone());
    if options.correction != 0.0 {
        rows = corrected(rows, weight, sums, &factor, &order, options.correction);
    }

    let levels = Levels::new(spec, options.sparsity);
    let moments: Vec<f32> = layer.moments.iter().map(|&moment| moment as f32).collect();
    let moments = Tensor::<1>::from_data(TensorData::new(moments, [k]), (&device, DType::F32));
    let (mut codes, mut losses) = (
        Codes::new(k * n),
        Tensor::<1>::zeros([n], (&device, DType::F32)),
    );
    let mut grids = vec![None; layer.groups.len()];
    for (index, places) in &layer.groups {
        let (group, group_moments) = (
            padded(rows.clone().slice(s![places.clone(), ..])),
            padded(moments.clone().slice(s![places.clone()])),
        );
        let (scales, zeros) = if places.len() <= MAX_ROWS {
            let part = block_of(&factor, places.start, places.end);
            Dispatch::gptq_grids(
                group.into_dispatch(),
                part.into_dispatch(),
                group_moments.into_dispatch(),
                levels,
            )
        } else {
            Dispatch::gptq_weighted_grids(
                group.into_dispatch(),
                group_moments.into_dispatch(),
                levels,
            )
        };
        let (scales, zeros) = (
            Tensor::<1>::from_dispatch(scales),
            Tensor::<1>::from_dispatch(zeros),
        );
        for start in places.clone().step_by(MAX_ROWS) {
            let end = places.end.min(start + MAX_ROWS);
            let (found, errors, lost) = Dispatch::gptq_round(
                padded(rows.clone().slice(s![start..end, ..])).into_dispatch(),
                block_of(&factor, start, end).into_dispatch(),
                padded(moments.clone().slice(s![start..end])).into_dispatch(),
                scales.clone().into_dispatch(),
                zeros.clone().into_dispatch(),
                levels,
            );
            let found = Tensor::<2>::from_dispatch(found).slice(s![0..end - start, ..]);
            let levels = found.clone() - zeros.clone().unsqueeze_dim(0);
            // The rounding does not read rounded rows again, so they are replaced with their
            // quantised values.
            rows = rows.slice_assign(s![start..end, ..], levels * scales.clone().unsqueeze_dim(0));
            codes.push(found)?;
            losses = losses + Tensor::<1>::from_dispatch(lost);
            if end < k {
                let errors = Tensor::<2>::from_dispatch(errors).slice(s![0..end - start, ..]);
                for part in panels(end..k, n) {
                    let taken_up = product(
                        factor
                            .clone()
                            .slice(s![start..end, part.clone()])
                            .transpose(),
                        errors.clone(),
                    );
                    let after = rows.clone().slice(s![part.clone(), ..]) - taken_up;
                    rows = rows.slice_assign(s![part, ..], after);
                }
            }
        }
        grids[*index] = Some((scales, zeros));
    }
    let (scales, zeros): (Vec<Tensor<1>>, Vec<Tensor<1>>) = grids.into_iter().flatten().unzip();
    let scales = read(Tensor::cat(scales, 0))?;
    if scales
        .iter()
        .any(|scale| !spec.scales.dtype.round_scale(scale.abs()).is_finite())
    {
        return Ok(None);
    }
    let zeros = read(Tensor::cat(zeros, 0))?
        .into_iter()
        .map(|zero| zero as u8)
        .collect();
    let q = codes.finish()?;
    let losses = read(losses)?.into_iter().map(f64::from).collect();
    let weight = layer.assemble(&q, &scales, zeros)?;
    let places: Vec<i32> = layer
        .places()
        .into_iter()
        .map(|place| place as i32)
        .collect();
    let values = rows.select(
        0,
        Tensor::from_data(TensorData::new(places, [k]), (&device, DType::I32)),
    );
    Ok(Some((
        Gptq {
            weight,
            losses: per_token(losses, sums.tokens()),
            damping,
            dead: layer.dead(),
        },
        values,
    )))
}

/// Corrects the rows of a weight, in the order in which they are rounded. Adds `part` of the change
/// with which the outputs would be nearest to those of the float model.
fn corrected(
    mut rows: Tensor<2>,
    weight: Tensor<2>,
    sums: &HessianSums,
    factor: &Tensor<2>,
    order: &Tensor<1, Int>,
    part: f32,
) -> Tensor<2> {
    let [k, n] = rows.dims();
    // Columns are independent of each other, so they are corrected in panels: the temporary
    // matrices are as large as the columns.
    for columns in panels(0..n, k) {
        let Some(right) = sums.correction(weight.clone(), columns.clone()) else {
            break;
        };
        let half = product(factor.clone(), right.select(0, order.clone()));
        let change = product(factor.clone().transpose(), half).mul_scalar(part);
        let changed = rows.clone().slice(s![.., columns.clone()]) + change;
        rows = rows.slice_assign(s![.., columns], changed);
    }
    rows
}

/// The codes of a weight. Whenever a panel of codes is on the device, they are moved to the host,
/// because f32 codes take as much memory as the weight.
struct Codes {
    on_device: Vec<Tensor<2>>,
    q: Vec<u8>,
}

impl Codes {
    /// Creates an empty list with capacity for `len` codes.
    fn new(len: usize) -> Self {
        Self {
            on_device: Vec::new(),
            q: Vec::with_capacity(len),
        }
    }

    /// Adds the codes of rows [rows, N].
    fn push(&mut self, rows: Tensor<2>) -> Result<(), QuantError> {
        self.on_device.push(rows);
        if self
            .on_device
            .iter()
            .map(|rows| rows.shape().num_elements())
            .sum::<usize>()
            >= PANEL
        {
            self.read()
        } else {
            Ok(())
        }
    }

    fn read(&mut self) -> Result<(), QuantError> {
        for rows in self.on_device.drain(..) {
            self.q
                .par_extend(read(rows)?.into_par_iter().map(|code| code as u8));
        }
        Ok(())
    }

    /// Returns all codes, row-major.
    fn finish(mut self) -> Result<Vec<u8>, QuantError> {
        self.read()?;
        Ok(self.q)
    }
}

/// Returns true if the sum of all absolute values is finite, so that every value is finite.
fn is_finite(weight: &Tensor<2>) -> Result<bool, QuantError> {
    Ok(read(weight.clone().abs().sum())?
        .iter()
        .all(|sum| sum.is_finite()))
}

/// Returns true if any column is 2:4.
fn has_two_four_columns(weight: &Tensor<2>) -> Result<bool, QuantError> {
    let [k, n] = weight.dims();
    let first = read(weight.clone().slice(s![0..k.min(FIRST_ROWS), ..]))?;
    Ok(k.is_multiple_of(4) && has_two_four(&first, n) && has_two_four(&read(weight.clone())?, n))
}

/// Pads rows with zeros after the last row, up to a multiple of [`STEP`].
fn padded<const D: usize>(rows: Tensor<D>) -> Tensor<D> {
    let mut shape = rows.dims();
    shape[0] = shape[0].next_multiple_of(STEP) - shape[0];
    if shape[0] == 0 {
        return rows;
    }
    let zeros = Tensor::zeros(shape, (&rows.device(), DType::F32));
    Tensor::cat(vec![rows, zeros], 0)
}

/// Returns the part of the factor for the places `start..end`, padded with a diagonal of ones up to
/// a multiple of [`STEP`].
fn block_of(factor: &Tensor<2>, start: usize, end: usize) -> Tensor<2> {
    let part = factor.clone().slice(s![start..end, start..end]);
    let (rows, whole) = (end - start, (end - start).next_multiple_of(STEP));
    if rows == whole {
        return part;
    }
    let ones = Tensor::<2>::eye(whole, &factor.device()).cast(FloatDType::F32);
    ones.slice_assign(s![0..rows, 0..rows], part)
}
