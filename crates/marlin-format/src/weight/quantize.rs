//! Round to nearest: the quantiser that needs no data.

use crate::layout::PlainLayout;
use crate::{FormatError, PlainParts, PlainWeight, QuantSpec, Scales};

/// Quantises `weight` (`[K, N]` row-major, f32) by rounding every value to the nearest of its
/// group's levels, sixteen or 256, ties to even.
///
/// With `top` the largest value, 15 or 255, and `mid` the midpoint, 8 or 128:
///
/// * Symmetric: `scale = max|w| / (top / 2)`, `q = clamp(round(w / scale) + mid, 0, top)`.
/// * With zero points: `scale = (max - min) / top` over a range that includes 0, `z =
///   clamp(round(-min / scale), 0, top)`, `q = clamp(round(w / scale) + z, 0, top)`.
///
/// The scale is rounded to the spec's dtype first, so that values are rounded to the levels that
/// will be read back. It is never below that dtype's smallest positive number: a group of zeros is
/// stored exactly, and no scale divides by 0. [`PlainWeight::underflows`] counts the groups of
/// smaller ones.
///
/// # Errors
/// [`QuantSpec::check_shape`]'s; [`FormatError::Length`] where `weight` does not have K * N values;
/// [`FormatError::NonFiniteWeight`]; [`FormatError::ScaleOverflow`].
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
    let layout = PlainLayout::new(k, n, spec.bits);
    let (top, midpoint) = (f32::from(spec.bits.max()), spec.bits.midpoint());
    let group_rows = spec.group.rows(k);
    let mut words = layout.padding();
    let mut scales = Vec::with_capacity(spec.group.count(k) * n);
    let mut zero_points = Vec::with_capacity(if spec.zero_points {
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
            let scale = spec.scale_dtype.round_scale(exact);
            if scale.is_infinite() {
                return Err(FormatError::ScaleOverflow {
                    row: first_row,
                    column,
                    value: exact,
                    dtype: spec.scale_dtype,
                });
            }
            let zero_point = if spec.zero_points {
                (-low / scale).round_ties_even().clamp(0.0, top)
            } else {
                f32::from(midpoint)
            };
            if spec.zero_points {
                zero_points.push(zero_point as u8);
            }
            group_scales.push(scale);
            offsets.push(zero_point);
        }

        for (i, row) in rows.chunks_exact(n).enumerate() {
            let row_in_weight = first_row + i;
            let start = layout.index(row_in_weight, 0);
            let packed = &mut words[start.word..][..n];
            for (((word, value), scale), offset) in
                packed.iter_mut().zip(row).zip(&group_scales).zip(&offsets)
            {
                let q = ((value / scale).round_ties_even() + offset).clamp(0.0, top) as u32;
                // The slot still holds the padding's midpoint, which this replaces by q.
                *word ^= (q ^ u32::from(midpoint)) << start.shift();
            }
        }
        scales.extend(group_scales);
    }

    PlainWeight::new(PlainParts {
        k,
        n,
        spec: *spec,
        words,
        metadata: None,
        scales: Scales::from_f32(&scales, spec.scale_dtype),
        zero_points: spec.zero_points.then_some(zero_points),
        row_permutation: None,
    })
}

/// The least and the greatest value of each column of `rows` (`[group rows, N]`), both with 0 among
/// the values.
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
