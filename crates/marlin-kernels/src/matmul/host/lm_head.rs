//! The product of few rows with a float table [columns, features], which is read once for all rows.

use super::HostFloat;
use super::simd::{Kernel, LANES, Simd, dispatch};
use super::threads::{Columns, for_each};

/// Maximum number of rows of [`head`], which reads the weight once for all rows.
pub const MAX_HEAD_ROWS: usize = 8;

/// Multiplies `x` [rows, features] with the transpose of `table` [columns, features]; returns
/// [rows, columns]. `x` has at most [`MAX_HEAD_ROWS`] rows.
///
/// # Panics
/// Panics if `x` has more rows.
pub fn head<T: HostFloat>(x: &[T], table: &[T], features: usize) -> Vec<T> {
    const STRIP: usize = 256;
    let (rows, columns) = (x.len() / features.max(1), table.len() / features.max(1));
    assert!(
        rows <= MAX_HEAD_ROWS,
        "{rows} rows of at most {MAX_HEAD_ROWS}"
    );
    let x: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
    let mut out = vec![T::default(); rows * columns];
    let parts = Columns::new(&mut out, columns);
    for_each(columns.div_ceil(STRIP), rows * table.len(), |task| {
        let first = task * STRIP;
        let table = &table[first * features..table.len().min((first + STRIP) * features)];
        dispatch(Dots {
            x: &x,
            table,
            features,
            out: &parts,
            first,
        });
    });
    out
}

/// The task that computes columns of the product from `first` on.
struct Dots<'a, T> {
    x: &'a [f32],
    table: &'a [T],
    features: usize,
    out: &'a Columns<'a, T>,
    first: usize,
}

impl<T: HostFloat> Kernel for Dots<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (column, weights) in self.table.chunks_exact(self.features).enumerate() {
            for (row, x) in self.x.chunks_exact(self.features).enumerate() {
                // SAFETY: no other task has this column.
                let out = unsafe { self.out.part(row, self.first + column, 1) };
                out[0] = T::from_f32(dot(simd, x, weights));
            }
        }
    }
}

/// Returns the dot product of two slices. It uses four partial sums, so that additions do not wait
/// for each other.
#[inline(always)]
pub fn dot<S: Simd, T: HostFloat>(simd: S, x: &[f32], weights: &[T]) -> f32 {
    const SUMS: usize = 4;
    let mut sums = [simd.splat(0.0); SUMS];
    let (x, x_rest) = x.as_chunks::<LANES>();
    let (weights, rest) = weights.as_chunks::<LANES>();
    let (x_blocks, x_left) = x.as_chunks::<SUMS>();
    let (blocks, left) = weights.as_chunks::<SUMS>();
    for (x, weights) in x_blocks.iter().zip(blocks) {
        for i in 0..SUMS {
            sums[i] = simd.mul_add(simd.load(&x[i]), T::load(simd, &weights[i]), sums[i]);
        }
    }
    for (x, weights) in x_left.iter().zip(left) {
        sums[0] = simd.mul_add(simd.load(x), T::load(simd, weights), sums[0]);
    }
    let [a, b, c, d] = sums;
    let mut sum = simd.sum(simd.add(simd.add(a, b), simd.add(c, d)));
    for (x, weight) in x_rest.iter().zip(rest) {
        sum += x * weight.to_f32();
    }
    sum
}
