//! The kernel that looks up the embeddings of a step's tokens.

use super::SequenceState;
use super::shape::RowsShape;
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::KernelError;
use marlin_kernels::pdl::{self, launch_dependents_and_wait};
use marlin_kernels::problem::expect_length;
use marlin_kernels::{Target, elementwise, vector_size};

/// The operands of [`embed`].
pub struct EmbedArgs {
    /// The embedding table [vocab, features], contiguous.
    pub table: BufferArg,
    /// The step's [`SequenceState`]s, i32 [rows, [`SequenceState::WORDS`]].
    pub row_state: BufferArg,
    /// The output [rows, features]; zeros for skipped rows and for tokens outside the vocabulary.
    pub out: BufferArg,
}

/// Copies the rows of `table` at the step's tokens to the output.
///
/// # Errors
/// Returns an error if a buffer has the wrong length, or the device does not support the dtype.
pub fn embed(
    client: &Client,
    shape: &RowsShape,
    vocab: usize,
    args: EmbedArgs,
) -> Result<(), KernelError> {
    let elements = shape.rows * shape.features;
    shape.dtype.expect_on(client)?;
    expect_length(
        shape,
        "embeddings",
        vocab * shape.features,
        args.table.len(),
    )?;
    expect_length(
        shape,
        "row state",
        shape.rows * SequenceState::WORDS,
        args.row_state.len(),
    )?;
    expect_length(shape, "output", elements, args.out.len())?;
    if elements == 0 {
        return Ok(());
    }
    let size = vector_size(client, shape.features, shape.dtype);
    let units = elements / size;
    let (count, dim) = elementwise(client, units);
    let EmbedArgs {
        table,
        row_state,
        out,
    } = args;
    embed_rows::launch(
        client,
        count,
        dim,
        size,
        table,
        row_state,
        out,
        shape.features / size,
        vocab as i32,
        pdl::is_supported(&Target::of(client)),
        shape.dtype.elem(),
    );
    pdl::make_edge_programmatic(client);
    Ok(())
}

/// Copies one vector of the output per unit. A row has `vectors` vectors.
#[cube(launch)]
fn embed_rows<F: Float, N: Size>(
    table: &[Vector<F, N>],
    row_state: &[i32],
    out: &mut [Vector<F, N>],
    vectors: usize,
    vocab: i32,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let words = ABSOLUTE_POS / vectors * comptime!(SequenceState::WORDS);
    let token = row_state[words + comptime!(SequenceState::TOKEN)];
    let position = row_state[words + comptime!(SequenceState::POSITION)];
    let mut value = Vector::<F, N>::new(F::cast_from(0.0f32));
    if position >= 0 && token >= 0 && token < vocab {
        value = table[token as usize * vectors + ABSOLUTE_POS % vectors];
    }
    out[ABSOLUTE_POS] = value;
}
