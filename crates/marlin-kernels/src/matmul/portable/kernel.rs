use cubecl::prelude::*;
use marlin_format::Bits;

/// The lengths of a problem, as runtime arguments of the kernels, all in elements.
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

/// Extracts value `slot` of a packed word.
#[cube]
fn unpack(word: u32, slot: usize, #[comptime] bits: Bits) -> f32 {
    let shift = u32::cast_from(slot * comptime!(bits.count()));
    f32::cast_from((word >> shift) & comptime!(u32::from(bits.max())))
}

/// Returns the zero point of a group and column; the midpoint if the format is symmetric.
#[cube]
fn zero_point(
    zero_points: &ComptimeOption<&[u32]>,
    group: usize,
    column: usize,
    lengths: &Lengths,
    #[comptime] bits: Bits,
) -> f32 {
    #[comptime]
    match zero_points {
        ComptimeOption::Some(words) => {
            let per_word = comptime!(bits.per_word());
            let word = words[group * lengths.n.div_ceil(per_word) + column / per_word];
            unpack(word, column % per_word, bits)
        }
        ComptimeOption::None => comptime!(f32::from(bits.midpoint())).runtime(),
    }
}

/// Returns the natural row of a stored row: its entry in the permutation, or the same row if there
/// is none.
#[cube]
fn natural_row(row_permutation: &ComptimeOption<&[u32]>, row: usize) -> usize {
    #[comptime]
    match row_permutation {
        ComptimeOption::Some(rows) => rows[row] as usize,
        ComptimeOption::None => row,
    }
}

/// Computes out[m, n] = sum over k of x[m, k] * (q[k, n] - z[g, n]) * s[g, n] + bias[n].
///
/// One unit computes `rows` rows of one column, so that a word of weights is unpacked once for all
/// these rows. Neighbouring units compute neighbouring columns.
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
    #[comptime] bits: Bits,
    #[comptime] rows: usize,
    #[define(F)] _activation_dtype: ElemType,
    #[define(S)] _scale_dtype: ElemType,
) {
    let column = ABSOLUTE_POS % lengths.n;
    let first_row = (ABSOLUTE_POS / lengths.n) * rows;
    if first_row >= lengths.m {
        terminate!();
    }

    // Rows beyond the last read the last row again, which avoids a branch in the loop; they are not
    // written.
    let mut x_row = Array::<usize>::new(rows);
    let mut sum = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        x_row[r] = min(first_row + r, lengths.m - 1) * lengths.k;
        sum[r] = 0.0;
    }

    let per_word = comptime!(bits.per_word());
    let groups = lengths.k.div_ceil(lengths.group);
    for g in 0..groups {
        let mut partial = Array::<f32>::new(rows);
        #[unroll]
        for r in 0..rows {
            partial[r] = 0.0;
        }
        let zero = zero_point(&zero_points, g, column, &lengths, bits);
        let end = min((g + 1) * lengths.group, lengths.k);
        for word_row in (g * lengths.group) / per_word..end.div_ceil(per_word) {
            let word = words[word_row * lengths.columns + column];
            #[unroll]
            for i in 0..per_word {
                let row = word_row * per_word + i;
                // Only the last word of a column can hold padding.
                if row < lengths.k {
                    let weight = unpack(word, i, bits) - zero;
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
                ComptimeOption::Some(bias) => {
                    out[row * lengths.n + column] =
                        F::cast_from(sum[r] + f32::cast_from(bias[column]))
                }
                ComptimeOption::None => out[row * lengths.n + column] = F::cast_from(sum[r]),
            }
        }
    }
}

/// Computes out[k, n] = (q[k, n] - z[g, n]) * s[g, n], in natural row order. One unit computes one
/// value.
#[cube(launch)]
pub(super) fn dequantize<F: Float, S: Float>(
    words: &[u32],
    scales: &[S],
    zero_points: ComptimeOption<&[u32]>,
    row_permutation: ComptimeOption<&[u32]>,
    out: &mut [F],
    lengths: Lengths,
    #[comptime] bits: Bits,
    #[define(F)] _activation_dtype: ElemType,
    #[define(S)] _scale_dtype: ElemType,
) {
    if ABSOLUTE_POS >= lengths.k * lengths.n {
        terminate!();
    }
    let row = ABSOLUTE_POS / lengths.n;
    let column = ABSOLUTE_POS % lengths.n;
    let group = row / lengths.group;
    let per_word = comptime!(bits.per_word());
    let q = unpack(
        words[(row / per_word) * lengths.columns + column],
        row % per_word,
        bits,
    );
    let zero = zero_point(&zero_points, group, column, &lengths, bits);
    let scale = f32::cast_from(scales[group * lengths.n + column]);
    out[natural_row(&row_permutation, row) * lengths.n + column] = F::cast_from((q - zero) * scale);
}
