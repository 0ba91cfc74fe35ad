use super::{MAX_BLOCKS, Routing};
use crate::pdl::{self, launch_dependents_and_wait};
use crate::problem::{MAX_ELEMENTS, expect_at_most, expect_length};
use crate::{ActivationDtype, KernelError, Target, vector_size};
use cubecl::client::Client;
use cubecl::prelude::*;

/// The number of units of a cube.
pub(super) const UNITS: usize = 256;

/// Adds the outputs of each token's experts, weighted by the router, in the order of the experts'
/// rank: `out` [tokens, features] from `rows` [tokens x top_k, features] in the order of experts.
/// The sums are in f32. With `beside` [tokens, features], such as the residual stream or the output
/// of shared experts, the sum of both.
///
/// # Errors
/// An error for a buffer of the wrong length, and for more tokens than a launch has blocks.
pub fn combine(
    client: &Client,
    routing: &Routing,
    features: usize,
    dtype: ActivationDtype,
    rows: BufferArg,
    beside: Option<BufferArg>,
    out: BufferArg,
) -> Result<(), KernelError> {
    let problem = format!("{} tokens of {features} features", routing.count);
    let elements = routing.count * features;
    expect_length(&problem, "rows", routing.rows() * features, rows.len())?;
    expect_length(&problem, "output", elements, out.len())?;
    if let Some(beside) = &beside {
        expect_length(&problem, "beside", elements, beside.len())?;
    }
    let largest = routing.rows().saturating_mul(features);
    expect_at_most(&problem, largest, MAX_ELEMENTS)?;
    expect_at_most(&problem, routing.count, MAX_BLOCKS)?;
    if elements == 0 {
        return Ok(());
    }
    let width = vector_size(client, features, dtype);
    let vectors = (features / width) as u32;
    // SAFETY: the lengths of the buffers were checked, and the kernel has a unit for each vector of
    // the output.
    unsafe {
        weighted_sums::launch_unchecked(
            client,
            CubeCount::new_2d(vectors.div_ceil(UNITS as u32), routing.count as u32),
            CubeDim::new_1d(UNITS as u32),
            width,
            rows,
            routing.of_rows(&routing.weights),
            routing.of_rows(&routing.places),
            beside.into(),
            out,
            vectors,
            routing.router.top_k,
            pdl::is_supported(&Target::of(client)),
            dtype.elem(),
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}

/// Writes the weighted sums of a token's rows, a unit for each vector of features.
#[cube(launch_unchecked)]
pub(super) fn weighted_sums<F: Float, N: Size>(
    rows: &[Vector<F, N>],
    weights: &[f32],
    places: &[u32],
    beside: ComptimeOption<&[Vector<F, N>]>,
    out: &mut [Vector<F, N>],
    vectors: u32,
    #[comptime] top_k: usize,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let vector = CUBE_POS_X * comptime!(UNITS as u32) + UNIT_POS_X;
    if vector < vectors {
        let (token, place) = (CUBE_POS_Y, CUBE_POS_Y * vectors + vector);
        let mut sum = Vector::<f32, N>::new(0.0);
        #[comptime]
        match beside {
            ComptimeOption::Some(beside) => {
                sum = Vector::<f32, N>::cast_from(beside[place as usize]);
            }
            ComptimeOption::None => {}
        }
        // All loads are in flight at the same time.
        #[unroll]
        for choice in 0..comptime!(top_k as u32) {
            let at = token * comptime!(top_k as u32) + choice;
            let row = places[at as usize];
            sum += Vector::<f32, N>::cast_from(rows[(row * vectors + vector) as usize])
                * Vector::<f32, N>::new(weights[at as usize]);
        }
        out[place as usize] = Vector::cast_from(sum);
    }
}
