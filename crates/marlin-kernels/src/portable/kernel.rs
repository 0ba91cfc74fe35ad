use cubecl::prelude::*;

/// Lengths of a problem as the kernels see them, all in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Lengths {
    /// Rows of activations.
    pub m: usize,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Words in a row of the packed weight: N rounded up to a multiple of 8.
    pub columns: usize,
    /// Rows of K that share a scale.
    pub group: usize,
}

/// The zero point of a group and column: 8 where the format is symmetric.
#[cube]
fn zero_point(zero_points: &ComptimeOption<&[u32]>, group: usize, column: usize, lengths: &Lengths) -> f32 {
    #[comptime]
    match zero_points {
        ComptimeOption::Some(words) => {
            let word = words[group * (lengths.columns / 8) + column / 8];
            f32::cast_from((word >> u32::cast_from(4 * (column % 8))) & 15u32)
        }
        ComptimeOption::None => 8.0f32.runtime(),
    }
}

/// The natural row of a stored row: itself, or its entry in the permutation.
#[cube]
fn natural_row(row_permutation: &ComptimeOption<&[u32]>, row: usize) -> usize {
    #[comptime]
    match row_permutation {
        ComptimeOption::Some(rows) => rows[row] as usize,
        ComptimeOption::None => row,
    }
}

/// out[m, n] = sum over k of x[m, k] * (q[k, n] - z[g, n]) * s[g, n] + bias[n].
///
/// One unit computes `rows` rows of one column, so that a word of eight weights is unpacked once for all of them. Units of neighbouring
/// columns are neighbours.
#[cube(launch)]
pub(super) fn matmul<F: Float, S: Float>(
    x: &[F],
    words: &[u32],
    scales: &[S],
    zero_points: ComptimeOption<&[u32]>,
    row_permutation: ComptimeOption<&[u32]>,
    bias: ComptimeOption<&[F]>,
    out: &mut [F],
    lengths: Lengths,
    #[comptime] rows: usize,
    #[define(F)] _activation_dtype: ElemType,
    #[define(S)] _scale_dtype: ElemType,
) {
    let column = ABSOLUTE_POS % lengths.n;
    let first_row = (ABSOLUTE_POS / lengths.n) * rows;
    if first_row >= lengths.m {
        terminate!();
    }

    // Rows past the last read the last one again: no branch in the loop, and they are not written.
    let mut x_row = Array::<usize>::new(rows);
    let mut sum = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        x_row[r] = min(first_row + r, lengths.m - 1) * lengths.k;
        sum[r] = 0.0;
    }

    let groups = lengths.k.div_ceil(lengths.group);
    for g in 0..groups {
        let mut partial = Array::<f32>::new(rows);
        #[unroll]
        for r in 0..rows {
            partial[r] = 0.0;
        }
        let zero = zero_point(&zero_points, g, column, &lengths);
        let end = min((g + 1) * lengths.group, lengths.k);
        for word_row in (g * lengths.group) / 8..end.div_ceil(8) {
            let word = words[word_row * lengths.columns + column];
            #[unroll]
            for i in 0..8usize {
                let row = word_row * 8 + i;
                // Only the last word of a column can hold padding.
                if row < lengths.k {
                    let weight = f32::cast_from((word >> comptime!(4 * i as u32)) & 15u32) - zero;
                    let feature = natural_row(&row_permutation, row);
                    #[unroll]
                    for r in 0..rows {
                        partial[r] += f32::cast_from(x[x_row[r] + feature]) * weight;
                    }
                }
            }
        }
        let scale = f32::cast_from(scales[g * lengths.n + column]);
        #[unroll]
        for r in 0..rows {
            sum[r] += partial[r] * scale;
        }
    }

    #[unroll]
    for r in 0..rows {
        let row = first_row + r;
        if row < lengths.m {
            #[comptime]
            match &bias {
                ComptimeOption::Some(bias) => out[row * lengths.n + column] = F::cast_from(sum[r] + f32::cast_from(bias[column])),
                ComptimeOption::None => out[row * lengths.n + column] = F::cast_from(sum[r]),
            }
        }
    }
}

/// out[k, n] = (q[k, n] - z[g, n]) * s[g, n], in natural row order. One unit a weight.
#[cube(launch)]
pub(super) fn dequantize<F: Float, S: Float>(
    words: &[u32],
    scales: &[S],
    zero_points: ComptimeOption<&[u32]>,
    row_permutation: ComptimeOption<&[u32]>,
    out: &mut [F],
    lengths: Lengths,
    #[define(F)] _activation_dtype: ElemType,
    #[define(S)] _scale_dtype: ElemType,
) {
    if ABSOLUTE_POS >= lengths.k * lengths.n {
        terminate!();
    }
    let row = ABSOLUTE_POS / lengths.n;
    let column = ABSOLUTE_POS % lengths.n;
    let group = row / lengths.group;
    let word = words[(row / 8) * lengths.columns + column];
    let q = f32::cast_from((word >> u32::cast_from(4 * (row % 8))) & 15u32);
    let zero = zero_point(&zero_points, group, column, &lengths);
    let scale = f32::cast_from(scales[group * lengths.n + column]);
    out[natural_row(&row_permutation, row) * lengths.n + column] = F::cast_from((q - zero) * scale);
}
