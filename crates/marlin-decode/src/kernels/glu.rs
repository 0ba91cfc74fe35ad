//! SiLU(gate) * up, the gated linear unit of Llama's MLP (SwiGLU, arXiv 2002.05202).

use super::shape::RowsShape;
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::KernelError;
use marlin_kernels::device::{elementwise, vector_size};
use marlin_kernels::problem::expect_length;

/// Operands of [`silu_mul`].
pub struct SiluMulArgs {
    /// [rows, 2 * features], the gates of a row before its ups, contiguous.
    pub gate_up: BufferArg,
    /// [rows, features]; written whole.
    pub out: BufferArg,
}

/// `gate / (1 + exp(-gate)) * up`, in f32 and rounded once. `features` of the shape are those of the output.
///
/// # Errors
/// A buffer of the wrong length, or a dtype that the device lacks.
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
    silu_mul_rows::launch(client, count, dim, size, args.gate_up, args.out, shape.features / size, shape.dtype.elem());
    Ok(())
}

/// One unit a vector of the output; `vectors` are in a row of it.
#[cube(launch)]
pub(super) fn silu_mul_rows<F: Float, N: Size>(
    gate_up: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let gate = ABSOLUTE_POS + ABSOLUTE_POS / vectors * vectors;
    let up = Vector::<f32, N>::cast_from(gate_up[gate + vectors]);
    let gate = Vector::<f32, N>::cast_from(gate_up[gate]);
    let one = Vector::<f32, N>::new(1.0);
    out[ABSOLUTE_POS] = Vector::cast_from(gate / (one + (-gate).exp()) * up);
}
