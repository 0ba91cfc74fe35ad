//! Round-to-nearest quantisation, which needs no calibration data.

use crate::layout::PlainLayout;
use crate::{FormatError, GroupSize, PlainParts, PlainWeight, QuantSpec, Scales, WeightValue};

/// Quantises `weight` (`[K, N]` row-major, f32) by rounding every value to the nearest level of its
/// group, ties to even.
///
/// With `top` the largest value, 15 or 255, and `mid` the midpoint, 8 or 128:
///
/// * Symmetric: `scale = max|w| / (top / 2)`, `q = clamp(round(w / scale) + mid, 0, top)`.
/// * With zero points: `scale = (max - min) / top` over a range that includes 0, `z =
///   clamp(round(-min / scale), 0, top)`, `q = clamp(round(w / scale) + z, 0, top)`.
///
/// * Floats: `scale = max|w| / largest`, with 6 for e2m1 and 448 for e4m3, and the nearest number.
///   Scales of e2m1 are those of its two formats. In groups of 32 (MXFP4) a scale is the power of
///   two `2^(floor(log2(max|w|)) - 2)` (OCP Microscaling Formats 1.0, section 6.3). In groups of 16
///   (NVFP4) it is the nearest e4m3 number times the f32 scale of the whole tensor, `max|w| / (6 *
///   448)`.
///
/// The scale is rounded to the spec's dtype first, so that values are rounded to the levels that
/// will be read back. The scale is never below the smallest positive number of its dtype (for f32,
/// the smallest normal number). A group of zeros is therefore stored exactly, and no value is
/// divided by 0. [`PlainWeight::underflows`] counts the groups whose scale is too small for the
/// dtype.
///
/// # Errors
/// The errors of [`QuantSpec::check_shape`]; [`FormatError::Length`] if `weight` does not have K *
/// N values; [`FormatError::NonFiniteWeight`]; [`FormatError::ScaleOverflow`].
pub fn quantize_rtn(
    weight: &[f32],
    k: usize,
    n: usize,
    spec: &QuantSpec,
) -> Result<PlainWeight, FormatError> {
    QuantSpec::check_shape(k, n)?;
    if weight.len() != k * n {
        return Err(FormatError::Length {
            what: "the weight",
            k,
            n,
            expected: k * n,
            found: weight.len(),
        });
    }
    spec.check()?;
    let layout = PlainLayout::new(k, n, spec.value);
    let tensor = spec.tensor_scale(weight);
    let (top, midpoint) = (f32::from(spec.value.max()), spec.value.midpoint());
    let group_rows = spec.scales.group.rows(k);
    let mut qweight = layout.padding();
    let mut scales = Vec::with_capacity(spec.scales.group.count(k) * n);
    let mut zero_points = Vec::with_capacity(if spec.has_zero_points() {
        scales.capacity()
    } else {
        0
    });

    for (group, rows) in weight.chunks(group_rows * n).enumerate() {
        let first_row = group * group_rows;
        let (low, high) = ranges(rows, n, first_row)?;
        let mut group_scales = Vec::with_capacity(n);
        let mut offsets = Vec::with_capacity(n);
        for (column, (&low, &high)) in low.iter().zip(&high).enumerate() {
            let exact = spec.exact_scale(low, high);
            let scale = spec.round_scale(exact, tensor);
            if scale.is_infinite() {
                return Err(FormatError::ScaleOverflow {
                    row: first_row,
                    column,
                    value: exact,
                    dtype: spec.scales.dtype,
                });
            }
            let zero_point = if spec.has_zero_points() {
                (-low / scale).round_ties_even().clamp(0.0, top)
            } else {
                f32::from(midpoint)
            };
            if spec.has_zero_points() {
                zero_points.push(zero_point as u8);
            }
            group_scales.push(scale);
            offsets.push(zero_point);
        }

        for (i, row) in rows.chunks_exact(n).enumerate() {
            let row_in_weight = first_row + i;
            let start = layout.index(row_in_weight, 0);
            let packed = &mut qweight[start.word..][..n];
            for (((word, value), scale), offset) in
                packed.iter_mut().zip(row).zip(&group_scales).zip(&offsets)
            {
                let q = if spec.value.is_float() {
                    u32::from(spec.value.encode(value / scale))
                } else {
                    ((value / scale).round_ties_even() + offset).clamp(0.0, top) as u32
                };
                // The slot still holds the midpoint of the padding, which this XOR replaces by q.
                *word ^= (q ^ u32::from(midpoint)) << start.shift();
            }
        }
        scales.extend(group_scales);
    }

    PlainWeight::new(PlainParts {
        k,
        n,
        spec: *spec,
        qweight,
        metadata: None,
        scales: Scales::from_f32(&scales, spec.scales.dtype),
        zero_points: spec.has_zero_points().then_some(zero_points),
        row_permutation: None,
    })
}

impl QuantSpec {
    /// Returns the f32 scale of a whole tensor of the weights `weight`, with which the largest
    /// group's scale is the largest e4m3. It is 1 for formats without such a scale.
    pub fn tensor_scale(&self, weight: &[f32]) -> f32 {
        if (self.value, self.scales.group) != (WeightValue::E2m1, GroupSize::G16) {
            return 1.0;
        }
        let most = weight
            .iter()
            .fold(0.0f32, |most, value| most.max(value.abs()));
        let scale = most / (WeightValue::E2m1.largest() * WeightValue::E4m3.largest());
        scale.max(f32::MIN_POSITIVE)
    }

    /// Rounds the scale of a group to a scale that the format can store: see [`quantize_rtn`].
    /// `tensor` is the [scale of the tensor](Self::tensor_scale).
    pub fn round_scale(&self, exact: f32, tensor: f32) -> f32 {
        let scale = match (self.value, self.scales.group) {
            (WeightValue::E2m1, GroupSize::G16) => {
                let code = WeightValue::E4m3.encode(exact / tensor).max(1);
                WeightValue::E4m3.decode(code) * tensor
            }
            // max|w| is 6 scales, and floor(log2(6)) is 2.
            (WeightValue::E2m1, _) if exact.is_normal() => {
                let most = exact * WeightValue::E2m1.largest();
                f32::from_bits(most.to_bits() & 0x7f80_0000) / 4.0
            }
            _ => exact,
        };
        self.scales.dtype.round_scale(scale)
    }
}

/// Returns the minimum and the maximum of 0 and the values of each column of `rows`
/// (`[group rows, N]`).
fn ranges(rows: &[f32], n: usize, first_row: usize) -> Result<(Vec<f32>, Vec<f32>), FormatError> {
    let (mut low, mut high) = (vec![0.0f32; n], vec![0.0f32; n]);
    let mut finite = true;
    for row in rows.chunks_exact(n) {
        for ((&value, low), high) in row.iter().zip(&mut low).zip(&mut high) {
            *low = if value < *low { value } else { *low };
            *high = if value > *high { value } else { *high };
            finite &= value.is_finite();
        }
    }
    if !finite && let Some(position) = rows.iter().position(|value| !value.is_finite()) {
        return Err(FormatError::NonFiniteWeight {
            row: first_row + position / n,
            column: position % n,
            value: rows[position],
        });
    }
    Ok((low, high))
}
