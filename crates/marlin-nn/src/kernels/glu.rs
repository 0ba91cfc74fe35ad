//! The kernel of SwiGLU (arXiv 2002.05202), the gated linear unit of Llama's MLP: SiLU(gate) * up.

use super::shape::RowsShape;
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::KernelError;
use marlin_kernels::pdl::{self, launch_dependents_and_wait};
use marlin_kernels::problem::expect_length;
use marlin_kernels::{Target, elementwise, vector_size};

/// The operands of [`silu_mul`].
pub struct SiluMulArgs {
    /// The input [rows, 2 * features], contiguous. The gates are the first half of a row.
    pub gate_up: BufferArg,
    /// The output [rows, features].
    pub out: BufferArg,
}

/// Computes `gate / (1 + exp(-gate)) * up` in f32 and rounds once. `shape.features` is the number
/// of features of the output.
///
/// # Errors
/// Returns an error if a buffer has the wrong length, or the device does not support the dtype.
pub fn silu_mul(client: &Client, shape: &RowsShape, args: SiluMulArgs) -> Result<(), KernelError> {
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
    silu_mul_rows::launch(
        client,
        count,
        dim,
        size,
        args.gate_up,
        args.out,
        shape.features / size,
        pdl::is_supported(&Target::of(client)),
        shape.dtype.elem(),
    );
    pdl::make_edge_programmatic(client);
    Ok(())
}

/// Computes one vector of the output per unit. A row of the output has `vectors` vectors.
#[cube(launch)]
pub(super) fn silu_mul_rows<F: Float, N: Size>(
    gate_up: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    vectors: usize,
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
    out[ABSOLUTE_POS] = Vector::cast_from(gate / (one + (-gate).exp()) * up);
}
