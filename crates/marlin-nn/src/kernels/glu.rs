//! The kernel of gated linear units (arXiv 2002.05202), such as SwiGLU in Llama's MLP.

use super::shape::RowsShape;
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::pdl::{self, launch_dependents_and_wait};
use marlin_kernels::problem::expect_length;
use marlin_kernels::{Epilogue, KernelError, Target, elementwise, vector_size};

/// The operands of [`gated`].
pub struct GatedArgs {
    /// The input [rows, 2 * features], contiguous. The gates are the first half of a row.
    pub gate_up: BufferArg,
    /// The output [rows, features].
    pub out: BufferArg,
}

/// Computes the outputs of gates and ups in f32, and rounds once. `shape.features` is the number of
/// features of the output. Without a gated epilogue, the outputs are those of SwiGLU.
///
/// # Errors
/// Returns an error if a buffer has the wrong length, or the device does not support the dtype.
pub fn gated(
    client: &Client,
    shape: &RowsShape,
    epilogue: Epilogue,
    args: GatedArgs,
) -> Result<(), KernelError> {
    let elements = shape.rows * shape.features;
    shape.dtype.expect_on(client)?;
    expect_length(shape, "gate and up", 2 * elements, args.gate_up.len())?;
    expect_length(shape, "output", elements, args.out.len())?;
    if elements == 0 {
        return Ok(());
    }
    let size = vector_size(client, shape.features, shape.dtype);
    let units = elements / size;
    let (count, dim) = elementwise(client, units);
    gated_rows::launch(
        client,
        count,
        dim,
        size,
        args.gate_up,
        args.out,
        shape.features / size,
        epilogue,
        pdl::is_supported(&Target::of(client)),
        shape.dtype.elem(),
    );
    pdl::make_edge_programmatic(client);
    Ok(())
}

/// Computes one vector of the output per unit. A row of the output has `vectors` vectors.
#[cube(launch)]
pub(super) fn gated_rows<F: Float, N: Size>(
    gate_up: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    vectors: usize,
    #[comptime] epilogue: Epilogue,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let gate = ABSOLUTE_POS + ABSOLUTE_POS / vectors * vectors;
    let up = Vector::<f32, N>::cast_from(gate_up[gate + vectors]);
    let gate = Vector::<f32, N>::cast_from(gate_up[gate]);
    let one = Vector::<f32, N>::new(1.0);
    if comptime!(epilogue == Epilogue::ClampedSwiGlu) {
        let limit = Vector::<f32, N>::new(Epilogue::CLAMPED_LIMIT);
        let slope = Vector::<f32, N>::new(Epilogue::CLAMPED_SLOPE);
        // Unlike `min` and `max`, a selection keeps NaN.
        let gate = select_many(gate.greater_than(&limit), limit, gate);
        let up = select_many(up.greater_than(&limit), limit, up);
        let up = select_many(up.less_than(&-limit), -limit, up);
        out[ABSOLUTE_POS] = Vector::cast_from(gate / (one + (-slope * gate).exp()) * (up + one));
    } else {
        out[ABSOLUTE_POS] = Vector::cast_from(gate / (one + (-gate).exp()) * up);
    }
}
