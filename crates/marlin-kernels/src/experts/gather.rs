use super::{MAX_BLOCKS, Routing};
use crate::pdl::{self, launch_dependents_and_wait};
use crate::problem::{MAX_ELEMENTS, expect_at_most, expect_length};
use crate::ptx::U4;
use crate::tile::RowOrder;
use crate::{ActivationDtype, KernelError, Target, vector_size};
use cubecl::client::Client;
use cubecl::prelude::*;

/// The number of units of a cube.
pub(super) const UNITS: usize = 256;
/// The number of rows that a unit loads at the same time.
const LOADS: usize = 4;

/// Operands of [`gather`]. All are contiguous.
pub struct GatherOperands {
    /// The activations: [tokens, K] gathered, [rows, K] sorted.
    pub x: BufferArg,
    /// The natural row index of each stored row of each expert's matrix [experts, K]; `None` for
    /// features in their order.
    pub row_permutation: Option<BufferArg>,
    /// The output [rows, K] in the order of experts.
    pub out: BufferArg,
}

/// Writes rows of `k` activations in the order of experts, each with its features in their order or
/// in that of the stored rows of its expert's matrix (act-order), for [`multiply`](super::multiply)
/// with [`RowOrder::Sorted`].
///
/// # Errors
/// Returns an error for a buffer of the wrong length, and for more rows than a launch has blocks.
pub fn gather(
    client: &Client,
    routing: &Routing,
    order: RowOrder,
    k: usize,
    dtype: ActivationDtype,
    operands: GatherOperands,
) -> Result<(), KernelError> {
    let GatherOperands {
        x,
        row_permutation,
        out,
    } = operands;
    let problem = format!("{} rows of {k} features", routing.rows());
    let (rows, tokens) = match order {
        RowOrder::Gathered => (routing.count, Some(routing.of_rows(&routing.tokens))),
        _ => (routing.rows(), None),
    };
    expect_length(&problem, "activations", rows * k, x.len())?;
    let stored = routing.router.experts * k;
    if let Some(permutation) = &row_permutation {
        expect_length(&problem, "row permutation", stored, permutation.len())?;
    }
    expect_length(&problem, "output", routing.rows() * k, out.len())?;
    let largest = stored.max(routing.rows().saturating_mul(k));
    expect_at_most(&problem, largest, MAX_ELEMENTS)?;
    expect_at_most(&problem, routing.most_blocks(), MAX_BLOCKS)?;
    if routing.rows() * k == 0 {
        return Ok(());
    }
    let width = match row_permutation {
        Some(_) => 1,
        None => vector_size(client, k, dtype),
    };
    let vectors = k / width;
    let cubes = CubeCount::new_2d(vectors.div_ceil(UNITS) as u32, routing.most_blocks() as u32);
    // SAFETY: the lengths of the buffers were checked, the routing's tables have rows, tokens and
    // experts of the problem alone, and a permutation has rows of K alone.
    unsafe {
        permuted_rows::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            width,
            x,
            row_permutation.into(),
            routing.blocks(),
            tokens.into(),
            out,
            vectors as u32,
            pdl::is_supported(&Target::of(client)),
            dtype.elem(),
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}

/// Writes the rows of a block, a unit for each vector of features, of which a row has `vectors`.
#[cube(launch_unchecked)]
pub(super) fn permuted_rows<F: Float, N: Size>(
    x: &[Vector<F, N>],
    row_permutation: ComptimeOption<&[u32]>,
    row_blocks: &[U4],
    tokens: ComptimeOption<&[u32]>,
    out: &mut [Vector<F, N>],
    vectors: u32,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let place = CUBE_POS_X * comptime!(UNITS as u32) + UNIT_POS_X;
    let blocks = row_blocks[0].extract(0usize);
    if CUBE_POS_Y < blocks && place < vectors {
        let block = row_blocks[(1 + CUBE_POS_Y) as usize];
        let mut source = place;
        #[comptime]
        match row_permutation {
            // A record may hold any numbers.
            ComptimeOption::Some(permutation) => {
                source = min(
                    permutation[(block.extract(0usize) * vectors + place) as usize],
                    vectors - 1,
                );
            }
            ComptimeOption::None => {}
        }
        let (mut row, rows) = (block.extract(1usize), block.extract(2usize));
        let last = row + rows - 1;
        while row <= last {
            let mut values = Array::<Vector<F, N>>::new(LOADS);
            #[unroll]
            for i in 0..LOADS {
                // Rows after the last are the last one again.
                let mut from = min(row + comptime!(i as u32), last);
                #[comptime]
                match tokens {
                    ComptimeOption::Some(tokens) => from = tokens[from as usize],
                    ComptimeOption::None => {}
                }
                values[i] = x[(from * vectors + source) as usize];
            }
            #[unroll]
            for i in 0..LOADS {
                let to = min(row + comptime!(i as u32), last);
                out[(to * vectors + place) as usize] = values[i];
            }
            row += comptime!(LOADS as u32);
        }
    }
}
