//! The head's product: few rows of activations with a float weight whose columns are contiguous, which is how checkpoints hold it.

mod planes;
pub(super) mod tensor_cores;

use super::planes::Planes;
use super::shape::{RowsShape, vector_size};
use crate::marlin::{Card, MIN_CAPABILITY};
use crate::{ActivationDtype, KernelError};
use cubecl::client::Client;
use cubecl::prelude::*;

/// Most rows on tensor cores. Measured on an H200, 4096 features, 32,000 columns: 71 us for up to 8 rows, 78 for 16, at most 118 for 32; Burn's matmul
/// takes 131 for 16 and 177 for 64. The weight's bytes take 60.
const MAX_ROWS: usize = 32;
/// Most rows without: 64 us for one row, 75 for two, 104 for four, 263 for eight.
const MAX_PLANE_ROWS: usize = 4;
/// Fewest rows for which tensor cores take less time.
const MIN_TENSOR_CORE_ROWS: usize = 2;

/// Operands of [`head`].
pub struct HeadArgs {
    /// [rows, features], contiguous.
    pub x: BufferArg,
    /// [columns, features], contiguous.
    pub weight: BufferArg,
    /// [rows, columns]; written whole.
    pub out: BufferArg,
}

/// Most rows that a client's device multiplies with [`head`].
pub fn max_head_rows(client: &Client, features: usize, dtype: ActivationDtype) -> usize {
    if has_tensor_cores(client, features, dtype) { MAX_ROWS } else { MAX_PLANE_ROWS }
}

fn has_tensor_cores(client: &Client, features: usize, dtype: ActivationDtype) -> bool {
    let is_card = Card::of(client).is_some_and(|card| card.capability >= MIN_CAPABILITY);
    is_card && dtype != ActivationDtype::F32 && features.is_multiple_of(tensor_cores::STEP)
}

/// `x` times the transposed weight, in f32 and rounded once: up to [`max_head_rows`] rows.
///
/// # Errors
/// A buffer of the wrong length, more rows, or a dtype that the device lacks.
pub fn head(client: &Client, shape: &RowsShape, columns: usize, args: HeadArgs) -> Result<(), KernelError> {
    let RowsShape { rows, features, dtype } = *shape;
    dtype.expect_on(client)?;
    shape.expect_within("rows", rows, max_head_rows(client, features, dtype))?;
    shape.expect_length("activations", rows * features, args.x.len())?;
    shape.expect_length("weight", columns * features, args.weight.len())?;
    shape.expect_length("output", rows * columns, args.out.len())?;
    let HeadArgs { x, weight, out } = args;
    if out.is_empty() {
        return Ok(());
    }
    if rows >= MIN_TENSOR_CORE_ROWS && has_tensor_cores(client, features, dtype) {
        let count = CubeCount::Static(columns.div_ceil(tensor_cores::COLUMNS) as u32, 1, 1);
        let dim = CubeDim::new_1d(32 * tensor_cores::WARPS as u32);
        let address = AddressType::from_len(columns * features / 8);
        let config = tensor_cores::Config::new(rows, features, dtype);
        // SAFETY: the lengths of all buffers were checked; columns and rows past the last are read as the last, and not written.
        unsafe { tensor_cores::head::launch_unchecked(client, count, dim, address, x, weight, out, columns, rows, config, dtype.elem()) };
        return Ok(());
    }
    let size = vector_size(client, features, dtype);
    let plane = Planes::of(client);
    let most = client.properties().hardware.max_units_per_cube as usize / plane.size;
    let planes = if plane.size == 1 { 1 } else { planes::PLANES.min(most) };
    let dim = CubeDim::new_1d((plane.size * planes) as u32);
    let count = CubeCount::Static(columns.div_ceil(planes) as u32, 1, 1);
    planes::head_columns::launch(client, count, dim, size, x, weight, out, columns, features, features / size, rows, plane, dtype.elem());
    Ok(())
}
