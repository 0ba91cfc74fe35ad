//! The head's product: few rows of activations with a float weight whose columns are contiguous, which is how checkpoints hold it. One plane a
//! column, so that a column is read once for all rows, 16 bytes a unit at a time.

use super::shape::{RowsShape, vector_size};
use crate::KernelError;
use cubecl::client::Client;
use cubecl::prelude::*;

/// Most rows: with more, a matmul on tensor cores takes less time.
pub const MAX_HEAD_ROWS: usize = 8;
/// Planes of a cube.
const PLANES: usize = 8;
/// Loads of a unit that are under way at a time.
const LOADS: usize = 8;

/// Operands of [`head`].
pub struct HeadArgs {
    /// [rows, features], contiguous.
    pub x: BufferArg,
    /// [columns, features], contiguous.
    pub weight: BufferArg,
    /// [rows, columns]; written whole.
    pub out: BufferArg,
}

/// `x` times the transposed weight, in f32 and rounded once: up to [`MAX_HEAD_ROWS`] rows.
///
/// # Errors
/// A buffer of the wrong length, more rows, or a dtype that the device lacks.
pub fn head(client: &Client, shape: &RowsShape, columns: usize, args: HeadArgs) -> Result<(), KernelError> {
    let RowsShape { rows, features, dtype } = *shape;
    dtype.expect_on(client)?;
    shape.expect_within("rows", rows, MAX_HEAD_ROWS)?;
    shape.expect_length("activations", rows * features, args.x.len())?;
    shape.expect_length("weight", columns * features, args.weight.len())?;
    shape.expect_length("output", rows * columns, args.out.len())?;
    if args.out.is_empty() {
        return Ok(());
    }
    let size = vector_size(client, features, dtype);
    let plane = client.properties().hardware.plane_size_min as usize;
    let planes = if plane == 1 { 1 } else { PLANES };
    let dim = CubeDim::new_1d((plane * planes) as u32);
    let count = CubeCount::Static(columns.div_ceil(planes) as u32, 1, 1);
    let HeadArgs { x, weight, out } = args;
    head_columns::launch(client, count, dim, size, x, weight, out, columns, features, features / size, rows, plane, dtype.elem());
    Ok(())
}

#[cube(launch)]
fn head_columns<F: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    out: &mut [F],
    columns: usize,
    #[comptime] features: usize,
    #[comptime] vectors: usize,
    #[comptime] rows: usize,
    #[comptime] plane: usize,
    #[define(F)] _dtype: ElemType,
) {
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
    // Some turns are written out, so that many loads are under way.
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
        let sum = if comptime!(plane > 1) { plane_sum(sum) } else { sum };
        if unit == 0 {
            out[row * columns + column] = F::cast_from(sum);
        }
    }
}
