//! The triangular factor of the inverse of a Hessian, on a device.

use crate::QuantError;
use crate::factor::{ATTEMPTS, inverse, upper_factor};
use crate::gptq::Layer;
use crate::hessian::read;
use crate::product::{panels, product};
use burn::tensor::{DType, Int, Tensor, TensorData, s};
use burn_marlin::device::with_dedicated_memory;
use std::ops::Range;

/// The number of features in a block of the factor.
const BLOCK: usize = 128;

/// Returns the upper triangular `U` with `H⁻¹ = Uᵀ U` of a Hessian [K, K] whose features are
/// rounded in `order`, and the damping that was used: the device's form of
/// [`InverseFactor`](crate::factor::InverseFactor). Besides the Hessian, only one matrix of its
/// size is on the device: each step overwrites the result of the previous step.
pub(super) fn inverse_factor(
    hessian: &Tensor<2>,
    order: &Tensor<1, Int>,
    layer: &Layer,
    damping: f64,
) -> Result<(Tensor<2>, f64), QuantError> {
    let k = layer.moments.len();
    let live = layer
        .moments
        .iter()
        .filter(|&&moment| moment > 0.0)
        .count()
        .max(1);
    let mean = layer.moments.iter().sum::<f64>() / live as f64;
    let mut tried = damping;
    for attempt in 0..=ATTEMPTS {
        tried = damping.max(f64::EPSILON) * 10f64.powi(attempt);
        let added: Vec<f64> = layer
            .moments
            .iter()
            .map(|&moment| if moment > 0.0 { tried * mean } else { 1.0 })
            .collect();
        if let Some((factor, inverses)) = upper_blocks(ordered(hessian, order), &added)? {
            return Ok((inverse_of(factor, inverses), tried));
        }
        tracing::debug!(
            damping = tried,
            "a Hessian has no Cholesky factor; damping grows"
        );
    }
    Err(QuantError::NoFactor { k, damping: tried })
}

/// Returns the Hessian with its features in `order`.
fn ordered(hessian: &Tensor<2>, order: &Tensor<1, Int>) -> Tensor<2> {
    let (k, device) = (order.dims()[0], hessian.device());
    let mut found = with_dedicated_memory(&device, || Tensor::empty([k, k], (&device, DType::F32)));
    for rows in panels(0..k, k) {
        let part = hessian
            .clone()
            .select(0, order.clone().slice(s![rows.clone()]))
            .select(1, order.clone());
        found = found.slice_assign(s![rows, ..], part);
    }
    found
}

/// Returns the upper triangular `R` with `H + added = R Rᵀ`, and the inverses of its diagonal
/// blocks, by a blocked Cholesky factorisation that begins with the last block. `R` overwrites the
/// Hessian, except the blocks below the diagonal. Returns `None` if `H + added` is not positive
/// definite.
fn upper_blocks(
    hessian: Tensor<2>,
    added: &[f64],
) -> Result<Option<(Tensor<2>, Vec<Tensor<2>>)>, QuantError> {
    let (k, device) = (added.len(), hessian.device());
    let mut factor = hessian;
    let mut inverses = Vec::new();
    for start in (0..k).step_by(BLOCK).rev() {
        let end = k.min(start + BLOCK);
        let rows = end - start;
        let mut panel = factor.clone().slice(s![0..end, start..end]);
        if end < k {
            let after = factor.clone().slice(s![0..end, end..k]);
            let own = factor.clone().slice(s![start..end, end..k]);
            panel = panel - product(after, own.transpose());
        }
        let block = read(panel.clone().slice(s![start..end, ..]))?;
        let entry = |i: usize, j: usize| {
            f64::from(block[i * rows + j]) + if i == j { added[start + i] } else { 0.0 }
        };
        let Some(root) = upper_factor(rows, &entry) else {
            return Ok(None);
        };
        let inverted = inverse(rows, &root);
        let to_device = |values: Vec<f32>| {
            Tensor::<2>::from_data(TensorData::new(values, [rows, rows]), (&device, DType::F32))
        };
        let inverted = to_device(inverted);
        // This product is computed before the matrix is written. A write copies the whole matrix if
        // another tensor still refers to it.
        let above = (start > 0)
            .then(|| product(panel.slice(s![0..start, ..]), inverted.clone().transpose()));
        factor = factor.slice_assign(
            s![start..end, start..end],
            to_device(root.into_iter().map(|value| value as f32).collect()),
        );
        if let Some(above) = above {
            factor = factor.slice_assign(s![0..start, start..end], above);
        }
        inverses.push(inverted);
    }
    Ok(Some((factor, inverses)))
}

/// Returns the inverse of an upper triangular matrix, given the inverses of its diagonal blocks
/// from the last to the first. The inverse overwrites the matrix; values below the diagonal blocks
/// are ignored.
fn inverse_of(mut factor: Tensor<2>, inverses: Vec<Tensor<2>>) -> Tensor<2> {
    let (k, device) = (factor.dims()[0], factor.device());
    for (start, inverted) in (0..k).step_by(BLOCK).rev().zip(inverses) {
        let end = k.min(start + BLOCK);
        factor = factor.slice_assign(s![start..end, start..end], inverted);
        if end < k {
            factor = factor.slice_assign(
                s![end..k, start..end],
                Tensor::zeros([k - end, end - start], (&device, DType::F32)),
            );
        }
    }
    with_inverse(factor, 0, k)
}

/// Inverts the part `start..end` of an upper triangular matrix whose diagonal blocks are inverted:
/// first the two halves `A` and `D` of the matrix `[A, B; 0, D]`, then `B`, which becomes `-A⁻¹ B
/// D⁻¹`.
fn with_inverse(mut matrix: Tensor<2>, start: usize, end: usize) -> Tensor<2> {
    let blocks = (end - start).div_ceil(BLOCK);
    if blocks < 2 {
        return matrix;
    }
    let middle = start + blocks / 2 * BLOCK;
    matrix = with_inverse(matrix, start, middle);
    matrix = with_inverse(matrix, middle, end);
    // `A⁻¹` has zeros before the diagonal: a row of the result needs only the same and later rows
    // of `B`, which are not overwritten yet.
    for rows in panels(start..middle, end - start) {
        let part =
            |rows: Range<usize>, columns: Range<usize>| matrix.clone().slice(s![rows, columns]);
        let left = product(
            part(rows.clone(), rows.start..middle),
            part(rows.start..middle, middle..end),
        );
        let above = product(left, part(middle..end, middle..end)).neg();
        matrix = matrix.slice_assign(s![rows, middle..end], above);
    }
    matrix
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::factor::InverseFactor;
    use crate::tests::{activations, rng};
    use crate::{GptqOptions, Hessian, HessianSums};
    use burn::tensor::Device;
    use marlin_format::{GroupSize, QuantSpec};

    /// Compares the factors with several panels, a feature that is always zero, and reordered
    /// features.
    #[test]
    fn the_factor_of_blocks_is_that_of_the_host() {
        let (k, tokens, mut rng) = (2500, 200, rng());
        let mut rows = activations(tokens, k, &mut rng);
        rows.chunks_exact_mut(k).for_each(|row| row[7] = 0.0);
        let device = Device::flex();
        let mut hessian = Hessian::new(k);
        hessian.add(&rows).unwrap();
        let mut sums = HessianSums::new(k, &device);
        sums.add(Tensor::from_data(
            TensorData::new(rows, [tokens, k]),
            &device,
        ))
        .unwrap();

        let layer = Layer::new(
            &hessian.diagonal(),
            8,
            &QuantSpec::int4(GroupSize::G128),
            &GptqOptions::default(),
        )
        .unwrap();
        let order: Vec<i32> = layer.order.iter().map(|&row| row as i32).collect();
        let order = Tensor::from_data(TensorData::new(order, [k]), (&device, DType::I32));
        let (found, damping) = inverse_factor(&sums.sum(), &order, &layer, 0.1).unwrap();
        let expected = InverseFactor::new(&hessian, &layer.order, 0.1).unwrap();
        assert_eq!(damping, expected.damping);
        for (i, found) in read(found).unwrap().chunks_exact(k).enumerate() {
            assert!(found[..i].iter().all(|&value| value == 0.0), "row {i}");
            let size = expected.row(i)[0];
            let near = |(found, expected): (&f32, &f32)| (found - expected).abs() < 1e-3 * size;
            assert!(found[i..].iter().zip(expected.row(i)).all(near), "row {i}");
        }
    }
}
