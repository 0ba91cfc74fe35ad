use cubecl::prelude::*;
use marlin_format::WeightValue;

/// The lengths of a problem, as runtime arguments of the kernels, all in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct PortableSizes {
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

/// Returns the number of value `slot` of a packed word: an integer, or the number of a float's
/// code.
#[cube]
fn number(word: u32, slot: usize, #[comptime] value: WeightValue) -> f32 {
    if comptime!(value.is_float()) {
        let code = word >> u32::cast_from(slot * comptime!(value.bits()));
        // The bits of exponent and mantissa, the place of the mantissa in f32, the difference of
        // the biases, and the smallest normal number.
        let (bits, place, bias, normal) = comptime!(match value {
            WeightValue::E2m1 => (7u32, 22u32, 126u32 << 23, 1.0f32),
            _ => (0x7f, 20, 120 << 23, 1.0 / 64.0),
        });
        // A subnormal code reads as 2^e (1 + m), which is more than its number, 2^(e + 1) m. No
        // subnormal f32 occurs, which some runtimes read as 0.
        let read = f32::reinterpret(((code & bits) << place) + bias);
        let magnitude = min(read, 2.0 * read - normal);
        if code & comptime!(bits + 1) == 0 {
            magnitude
        } else {
            -magnitude
        }
    } else {
        unpack(word, slot, value)
    }
}

/// Extracts value `slot` of a packed word.
#[cube]
fn unpack(word: u32, slot: usize, #[comptime] value: WeightValue) -> f32 {
    let shift = u32::cast_from(slot * comptime!(value.bits()));
    f32::cast_from((word >> shift) & comptime!(u32::from(value.max())))
}

/// Returns the zero point of a group and column; the midpoint if the format is symmetric.
#[cube]
fn zero_point(
    zero_points: &ComptimeOption<&[u32]>,
    group: usize,
    column: usize,
    sizes: &PortableSizes,
    #[comptime] value: WeightValue,
) -> f32 {
    #[comptime]
    match zero_points {
        ComptimeOption::Some(words) => {
            let per_word = comptime!(value.per_word());
            let word = words[group * sizes.n.div_ceil(per_word) + column / per_word];
            unpack(word, column % per_word, value)
        }
        ComptimeOption::None => comptime!(f32::from(value.midpoint())).runtime(),
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
    qweight: &[u32],
    scales: &[S],
    zero_points: ComptimeOption<&[u32]>,
    row_permutation: ComptimeOption<&[u32]>,
    bias: ComptimeOption<&[F]>,
    out: &mut [F],
    sizes: PortableSizes,
    #[comptime] value: WeightValue,
    #[comptime] rows: usize,
    #[define(F)] _activation_dtype: ElemType,
    #[define(S)] _scale_dtype: ElemType,
) {
    let column = ABSOLUTE_POS % sizes.n;
    let first_row = (ABSOLUTE_POS / sizes.n) * rows;
    if first_row >= sizes.m {
        terminate!();
    }

    // Rows beyond the last read the last row again, which avoids a branch in the loop; they are not
    // written.
    let mut x_row = Array::<usize>::new(rows);
    let mut sum = Array::<f32>::new(rows);
    #[unroll]
    for r in 0..rows {
        x_row[r] = min(first_row + r, sizes.m - 1) * sizes.k;
        sum[r] = 0.0;
    }

    let per_word = comptime!(value.per_word());
    let groups = sizes.k.div_ceil(sizes.group);
    for g in 0..groups {
        let mut partial = Array::<f32>::new(rows);
        #[unroll]
        for r in 0..rows {
            partial[r] = 0.0;
        }
        let zero = zero_point(&zero_points, g, column, &sizes, value);
        let end = min((g + 1) * sizes.group, sizes.k);
        for word_row in (g * sizes.group) / per_word..end.div_ceil(per_word) {
            let word = qweight[word_row * sizes.columns + column];
            #[unroll]
            for i in 0..per_word {
                let row = word_row * per_word + i;
                // Only the last word of a column can hold padding.
                if row < sizes.k {
                    let weight = number(word, i, value) - zero;
                    let feature = natural_row(&row_permutation, row);
                    #[unroll]
                    for r in 0..rows {
                        partial[r] += f32::cast_from(x[x_row[r] + feature]) * weight;
                    }
                }
            }
        }
        let scale = f32::cast_from(scales[g * sizes.n + column]);
        #[unroll]
        for r in 0..rows {
            sum[r] += partial[r] * scale;
        }
    }

    #[unroll]
    for r in 0..rows {
        let row = first_row + r;
        if row < sizes.m {
            #[comptime]
            match &bias {
                ComptimeOption::Some(bias) => {
                    out[row * sizes.n + column] =
                        F::cast_from(sum[r] + f32::cast_from(bias[column]))
                }
                ComptimeOption::None => out[row * sizes.n + column] = F::cast_from(sum[r]),
            }
        }
    }
}

/// Computes out[k, n] = (q[k, n] - z[g, n]) * s[g, n], in natural row order. One unit computes one
/// value.
#[cube(launch)]
pub(super) fn dequantize<F: Float, S: Float>(
    qweight: &[u32],
    scales: &[S],
    zero_points: ComptimeOption<&[u32]>,
    row_permutation: ComptimeOption<&[u32]>,
    out: &mut [F],
    sizes: PortableSizes,
    #[comptime] value: WeightValue,
    #[define(F)] _activation_dtype: ElemType,
    #[define(S)] _scale_dtype: ElemType,
) {
    if ABSOLUTE_POS >= sizes.k * sizes.n {
        terminate!();
    }
    let row = ABSOLUTE_POS / sizes.n;
    let column = ABSOLUTE_POS % sizes.n;
    let group = row / sizes.group;
    let per_word = comptime!(value.per_word());
    let q = number(
        qweight[(row / per_word) * sizes.columns + column],
        row % per_word,
        value,
    );
    let zero = zero_point(&zero_points, group, column, &sizes, value);
    let scale = f32::cast_from(scales[group * sizes.n + column]);
    out[natural_row(&row_permutation, row) * sizes.n + column] = F::cast_from((q - zero) * scale);
}
