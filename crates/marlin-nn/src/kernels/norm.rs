//! The kernel that computes the RMSNorm of each row, optionally after an addition to the residual
//! stream, with one cube per row.

use super::shape::{RowsShape, most_units};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::KernelError;
use marlin_kernels::pdl::{self, launch_dependents_and_wait};
use marlin_kernels::planes::{Planes, plane_total};
use marlin_kernels::problem::expect_length;
use marlin_kernels::{Target, vector_size};

/// The operands of [`rms_norm`]: rows of `features` values each, contiguous.
pub struct RmsNormArgs {
    /// The activations [rows, features].
    pub x: BufferArg,
    /// The residual stream [rows, features]. `x` is added to the stream in place, and the sum is
    /// normalised. Without a residual stream, `x` is normalised.
    pub residual: Option<BufferArg>,
    /// The weight, `[features]`.
    pub weight: BufferArg,
    /// The output [rows, features].
    pub out: BufferArg,
}

/// Computes `x / sqrt(mean(x^2) + epsilon) * weight` of each row.
///
/// The normalisation is computed in f32 and rounded before the weight is applied, as Hugging Face's
/// Llama does. The sum with the residual stream is rounded, too.
///
/// # Errors
/// Returns an error if a buffer has the wrong length, or the device does not support the dtype.
pub fn rms_norm(
    client: &Client,
    shape: &RowsShape,
    epsilon: f32,
    args: RmsNormArgs,
) -> Result<(), KernelError> {
    let elements = shape.rows * shape.features;
    shape.dtype.expect_on(client)?;
    expect_length(shape, "activations", elements, args.x.len())?;
    if let Some(residual) = &args.residual {
        expect_length(shape, "residual", elements, residual.len())?;
    }
    expect_length(shape, "norm weight", shape.features, args.weight.len())?;
    expect_length(shape, "output", elements, args.out.len())?;
    if elements == 0 {
        return Ok(());
    }
    let size = vector_size(client, shape.features, shape.dtype);
    let vectors = shape.features / size;
    let planes = Planes::of(client);
    let units = cube_units(vectors, planes, most_units(client));
    let (count, dim) = (
        CubeCount::Static(shape.rows as u32, 1, 1),
        CubeDim::new_1d(units as u32),
    );
    let RmsNormArgs {
        x,
        residual,
        weight,
        out,
    } = args;
    rms_norm_rows::launch(
        client,
        count,
        dim,
        size,
        x,
        residual.into(),
        weight,
        out,
        epsilon,
        vectors,
        shape.features,
        units,
        planes,
        pdl::is_supported(&Target::of(client)),
        shape.dtype.elem(),
    );
    pdl::make_edge_programmatic(client);
    Ok(())
}

/// The maximum number of units of a cube. With 8 values per unit, a cube holds a row of 8192
/// features.
const MAX_UNITS: usize = 1024;
/// The maximum number of planes of a cube, because each unit adds the sums of all planes.
const MAX_PLANES: usize = 64;

/// Returns the number of units of a cube for rows of `vectors` vectors, on a device whose cubes
/// have at most `most` units.
pub(super) fn cube_units(vectors: usize, planes: Planes, most: usize) -> usize {
    let plane = planes.size;
    vectors
        .next_multiple_of(plane)
        .min(MAX_UNITS.min(most) / plane * plane)
        .min(MAX_PLANES * plane)
}

#[cube(launch)]
pub(super) fn rms_norm_rows<F: Float, N: Size>(
    x: &[Vector<F, N>],
    mut residual: ComptimeOption<&mut [Vector<F, N>]>,
    weight: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    epsilon: f32,
    #[comptime] vectors: usize,
    #[comptime] features: usize,
    #[comptime] units: usize,
    #[comptime] planes: Planes,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let unit = UNIT_POS as usize;
    let first = CUBE_POS * vectors;
    // The row stays in registers between the two passes. The weights are loaded in the first pass,
    // so that their latency overlaps with that of the values.
    let each = comptime!(vectors.div_ceil(units));
    let mut values = Array::<Vector<f32, N>>::new(each);
    let mut weights = Array::<Vector<F, N>>::new(each);
    let mut squares = Vector::<f32, N>::new(0.0);
    #[unroll]
    for i in 0..each {
        let place = unit + i * units;
        if place < vectors {
            weights[i] = weight[place];
            let value = add(x, &mut residual, first + place);
            values[i] = value;
            squares += value * value;
        }
    }
    let mut square = 0.0f32;
    #[unroll]
    for i in 0..comptime!(features / vectors) {
        square += squares.extract(i);
    }
    let mean = cube_sum(square, units, planes) / comptime!(features as f32);
    let scale = Vector::<f32, N>::new(1.0 / (mean + epsilon).sqrt());
    #[unroll]
    for i in 0..each {
        let place = unit + i * units;
        if place < vectors {
            out[first + place] = Vector::<F, N>::cast_from(values[i] * scale) * weights[i];
        }
    }
}

/// Returns a vector of `x` in f32. With a residual stream, adds the vector to the stream in place,
/// and returns the sum.
#[cube]
fn add<F: Float, N: Size>(
    x: &[Vector<F, N>],
    residual: &mut ComptimeOption<&mut [Vector<F, N>]>,
    place: usize,
) -> Vector<f32, N> {
    let value = x[place];
    #[comptime]
    match residual {
        ComptimeOption::Some(residual) => {
            let sum = residual[place] + value;
            residual[place] = sum;
            Vector::<f32, N>::cast_from(sum)
        }
        ComptimeOption::None => Vector::<f32, N>::cast_from(value),
    }
}

/// Returns the sum of one value per unit over the cube, added in a fixed order.
#[cube]
fn cube_sum(value: f32, #[comptime] units: usize, #[comptime] planes: Planes) -> f32 {
    let plane = comptime!(planes.size);
    let of_plane = plane_total(value, plane);
    let count = comptime!(units.div_ceil(plane));
    let mut sum = of_plane;
    if comptime!(count > 1) {
        let mut sums = Shared::<[f32]>::new_slice(count);
        let lane = if comptime!(plane > 1 && planes.is_only_size) {
            UNIT_POS_PLANE as usize
        } else {
            UNIT_POS as usize % plane
        };
        if lane == 0 {
            sums[UNIT_POS as usize / plane] = of_plane;
        }
        sync_cube();
        sum = 0.0;
        #[unroll]
        for i in 0..count {
            sum += sums[i];
        }
    }
    sum
}
