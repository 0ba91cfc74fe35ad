//! The lm_head kernel with one plane for each column: a column is read once for all rows, 16 bytes
//! per unit at a time. It supports any dtype, on any runtime.

use crate::matmul::float::biased;
use crate::pdl::launch_dependents_and_wait;
use crate::planes::{Planes, plane_total};
use cubecl::prelude::*;

/// Planes of a cube.
pub(super) const PLANES: usize = 8;
/// Number of loads that a unit has in flight.
const LOADS: usize = 8;

#[cube(launch)]
pub(super) fn head_columns<F: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    bias: ComptimeOption<&[F]>,
    out: &mut [F],
    columns: usize,
    #[comptime] features: usize,
    #[comptime] vectors: usize,
    #[comptime] rows: usize,
    #[comptime] planes: Planes,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let plane = comptime!(planes.size);
    let column = ABSOLUTE_POS / plane;
    let unit = ABSOLUTE_POS % plane;
    if column >= columns {
        terminate!();
    }
    let mut sums = Array::<Vector<f32, N>>::new(rows);
    #[unroll]
    for row in 0..rows {
        sums[row] = Vector::new(0.0);
    }
    // Some iterations are unrolled, so that many loads are in flight.
    for turn in 0..comptime!(vectors.div_ceil(plane * LOADS)) {
        #[unroll]
        for load in 0..LOADS {
            let place = unit + (turn * LOADS + load) * plane;
            if comptime!(vectors.is_multiple_of(plane * LOADS)) || place < vectors {
                let weights = Vector::<f32, N>::cast_from(weight[column * vectors + place]);
                #[unroll]
                for row in 0..rows {
                    sums[row] += weights * Vector::cast_from(x[row * vectors + place]);
                }
            }
        }
    }
    #[unroll]
    for row in 0..rows {
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..comptime!(features / vectors) {
            sum += sums[row].extract(i);
        }
        let sum = plane_total(sum, planes.size);
        if unit == 0 {
            let sum = biased::<F>(sum, &bias, column);
            out[row * columns + column] = F::cast_from(sum);
        }
    }
}
