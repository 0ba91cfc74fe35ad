use super::filter::shared_bytes;
use super::kernel::{self, SampleSizesLaunch};
use super::token_table::TokenTable;
use super::{CHUNK, CHUNK_BLOCKS, MAX_BLOCKS, RECORD, TOKEN_BITS};
use crate::kernels::shape::shared_memory;
use crate::kernels::{SequenceState, lacks};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::pdl;
use marlin_kernels::problem::{MAX_ELEMENTS, expect_at_least, expect_at_most, expect_length};
use marlin_kernels::{ActivationDtype, KernelError, Runtime, Target};
use std::fmt;

/// The number of units of a cube of `score`, if the device supports as many. Each unit has four
/// tokens.
const SCORE_UNITS: u32 = 256;
/// The number of units of a cube of `choose`, if the device supports as many. With 1024 units, each
/// would have too few registers.
const CHOOSE_UNITS: u32 = 512;

/// The shape of the problem that [`sample`] is launched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleShape {
    /// The number of rows of the step.
    pub rows: usize,
    /// The number of tokens of the vocabulary, at most 2^18.
    pub vocab: usize,
    /// The number of slots of the cache.
    pub slots: usize,
    /// The number of positions of the context window. A row whose token is at the last position
    /// becomes [`WindowFull`](crate::kernels::SequenceStatus::WindowFull).
    pub max_len: usize,
    /// The dtype of the logits.
    pub dtype: ActivationDtype,
}

impl SampleShape {
    /// Returns the number of words of the token table.
    pub fn table_words(&self) -> usize {
        let words = TokenTable::words(self.vocab);
        self.slots.saturating_mul(TokenTable::ROWS * words)
    }

    fn chunks(&self) -> usize {
        self.vocab.div_ceil(CHUNK)
    }
}

impl fmt::Display for SampleShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rows,
            vocab,
            slots,
            max_len,
            dtype,
        } = self;
        write!(
            f,
            "sample rows={rows} vocabulary={vocab} slots={slots} window={max_len} {dtype}"
        )
    }
}

/// The operands of [`sample`].
pub struct SampleArgs {
    /// The logits [rows, vocab] in the shape's dtype, contiguous.
    pub logits: BufferArg,
    /// i32 [rows, [`SequenceState::WORDS`]]: read, and token and position written. Slots are below
    /// the shape's, and no two rows share one.
    pub state: BufferArg,
    /// The [`TokenTable`], u32 or i32. The launch updates the data of the chosen tokens.
    pub token_table: BufferArg,
    /// A workspace of at least [`workspace_words`] words, u32 or i32. Its contents are undefined
    /// before and after the launch.
    pub workspace: BufferArg,
}

/// Returns the number of 32-bit words of the workspace of [`sample`].
pub fn workspace_words(shape: &SampleShape) -> usize {
    shape.rows * shape.chunks() * RECORD
}

/// Chooses the next token of every row that is at a position. Writes the token, and the next
/// position or the status in which the sequence ended.
///
/// The grids and arguments do not depend on the contents of the buffers, so the launches can be
/// recorded once and replayed.
///
/// # Errors
/// Returns an error in the cases of [`check_device`], if a buffer has the wrong length or is an
/// alias, if operands have more elements than 32-bit indices can address, or if the device does not
/// support the dtype.
pub fn sample(client: &Client, shape: &SampleShape, args: SampleArgs) -> Result<(), KernelError> {
    let blocks = check_device(client, shape)?;
    check(client, shape, &args)?;
    let SampleShape {
        rows,
        vocab,
        max_len,
        dtype,
        ..
    } = *shape;
    if rows == 0 {
        return Ok(());
    }
    tracing::trace!(%shape, "sample");
    let [words, chunks] = [TokenTable::words(vocab), shape.chunks()].map(|length| length as u32);
    let sizes = || {
        SampleSizesLaunch::new(
            vocab as u32,
            chunks,
            words,
            u32::try_from(max_len).unwrap_or(u32::MAX),
        )
    };
    // If the length of a row is not a multiple of 4, not every row starts where four logits can be
    // read at once.
    let lanes = if vocab.is_multiple_of(4) { 4 } else { 1 };
    let [score_units, choose_units] = [SCORE_UNITS, CHOOSE_UNITS].map(|most| units(client, most));
    let target = Target::of(client);
    let is_shader = !matches!(target.runtime, Runtime::Cuda | Runtime::Cpu);
    let [logits, logits_again] = twice("logits", shape, args.logits)?;
    let [state, state_again] = twice("state", shape, args.state)?;
    let [table, table_again] = twice("token table", shape, args.token_table)?;
    let [records, records_again] = twice("workspace", shape, args.workspace)?;
    let uses_pdl = pdl::is_supported(&target);
    kernel::score::launch(
        client,
        CubeCount::new_1d(rows as u32 * chunks),
        CubeDim::new_1d(score_units),
        lanes,
        logits,
        state,
        table,
        records,
        sizes(),
        lanes,
        score_units as usize,
        is_shader,
        uses_pdl,
        dtype.elem(),
    );
    pdl::make_edge_programmatic(client);
    kernel::choose::launch(
        client,
        CubeCount::new_1d(rows as u32),
        CubeDim::new_1d(choose_units),
        lanes,
        logits_again,
        state_again,
        table_again,
        records_again,
        sizes(),
        lanes,
        choose_units as usize,
        blocks,
        is_shader,
        uses_pdl,
        dtype.elem(),
    );
    pdl::make_edge_programmatic(client);
    Ok(())
}

/// Returns the number of units of a cube: a power of two, as the reductions require.
pub(super) fn units(client: &Client, most: u32) -> u32 {
    1 << most
        .min(client.properties().hardware.max_units_per_cube)
        .ilog2()
}

/// Checks that a device can sample. Returns the number of blocks of 32 tokens that the shortlist
/// can hold.
///
/// # Errors
/// Returns [`KernelError::Vocabulary`] if the vocabulary has no tokens or more than 2^18, and
/// [`KernelError::Shape`] if the device has no arithmetic in the dtype, no 64-bit integers, or too
/// little shared memory for the vocabulary.
pub fn check_device(client: &Client, shape: &SampleShape) -> Result<usize, KernelError> {
    let limit = 1 << TOKEN_BITS;
    if shape.vocab == 0 || shape.vocab > limit {
        return Err(KernelError::Vocabulary {
            found: shape.vocab,
            limit,
        });
    }
    let refuse = |reason| KernelError::Shape {
        problem: shape.to_string(),
        reason,
    };
    if let Some(lacked) = lacks(client, shape.dtype) {
        return Err(refuse(lacked));
    }
    let sums = 2 * units(client, CHOOSE_UNITS) as usize * size_of::<u64>();
    // If there is room, the size is the same for all vocabularies, so that they share a kernel.
    // Some bytes are lost to alignment.
    let fits = |blocks: &usize| sums + shared_bytes(*blocks) + 64 <= shared_memory(client);
    let blocks = [MAX_BLOCKS, shape.chunks() * CHUNK_BLOCKS]
        .into_iter()
        .find(fits);
    blocks.ok_or_else(|| refuse("the device has too little shared memory for the vocabulary"))
}

/// Returns an operand twice, for the two launches.
fn twice(
    operand: &'static str,
    shape: &SampleShape,
    arg: BufferArg,
) -> Result<[BufferArg; 2], KernelError> {
    let length = arg.len();
    let BufferArg::Handle { handle } = arg else {
        return Err(KernelError::Alias {
            operand,
            problem: shape.to_string(),
        });
    };
    let binding = handle.handle;
    // SAFETY: the buffer and its length are those of the operand.
    Ok([binding.clone(), binding]
        .map(|binding| unsafe { BufferArg::from_raw_parts_binding(binding, length) }))
}

/// Checks all assumptions of the kernels, except those about the contents of the state's rows.
fn check(client: &Client, shape: &SampleShape, args: &SampleArgs) -> Result<(), KernelError> {
    let SampleShape {
        rows, vocab, dtype, ..
    } = *shape;
    let elements = rows.saturating_mul(vocab).max(shape.table_words());
    expect_at_most(shape, elements, MAX_ELEMENTS)?;
    dtype.expect_on(client)?;
    expect_length(shape, "logits", rows * vocab, args.logits.len())?;
    expect_length(
        shape,
        "state",
        rows * SequenceState::WORDS,
        args.state.len(),
    )?;
    expect_length(
        shape,
        "token table",
        shape.table_words(),
        args.token_table.len(),
    )?;
    expect_at_least(
        shape,
        "workspace",
        workspace_words(shape),
        args.workspace.len(),
    )
}
