use super::filter::shared_bytes;
use super::kernel::{self, LengthsLaunch};
use super::{BITMAPS, BLOCK, CHUNK, CHUNK_BLOCKS, MAX_BLOCKS, RECORD, TOKEN_BITS};
use crate::kernels::shape::shared_memory;
use crate::kernels::{Row, lacks};
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::overlap;
use marlin_kernels::problem::{MAX_ELEMENTS, expect_at_least, expect_at_most, expect_length};
use marlin_kernels::{ActivationDtype, KernelError, Runtime, Target};
use std::fmt;

/// Units of a cube of `score`, where the device has as many: each has four tokens.
const SCORE_UNITS: u32 = 256;
/// Units of a cube of `choose`, likewise: of 1024, each would have too few registers.
const CHOOSE_UNITS: u32 = 512;

/// The problem that [`sample`] is launched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleShape {
    /// Rows of the step.
    pub rows: usize,
    /// Tokens of the vocabulary, at most 2^18.
    pub vocab: usize,
    /// Slots of the cache.
    pub slots: usize,
    /// Positions of the window: the row whose token is at the last of them is full.
    pub max_len: usize,
    /// Dtype of the logits.
    pub dtype: ActivationDtype,
}

impl SampleShape {
    /// Words of a bitmap of tokens.
    pub fn bitmap_words(&self) -> usize {
        self.vocab.div_ceil(BLOCK)
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

/// Operands of [`sample`].
pub struct SampleArgs {
    /// [rows, vocab] in the shape's dtype, contiguous.
    pub logits: BufferArg,
    /// i32 [rows, [`Row::WORDS`]]: read, and token and position written. Slots are below the
    /// shape's, and no two rows share one.
    pub state: BufferArg,
    /// u32 or i32 [slots, [`BITMAPS`], vocab / 32 up]: bit `token % 32` of word `token / 32` says
    /// of a slot's first bitmap that the token occurred in its sequence, and of its second one that
    /// the token is suppressed. The chosen token's in the first one is set.
    pub bitmaps: BufferArg,
    /// u32 or i32, [`workspace_words`] or more; what it holds does not matter, before and after.
    pub workspace: BufferArg,
}

/// Words of 32 bits that [`sample`] needs to work in.
pub fn workspace_words(shape: &SampleShape) -> usize {
    shape.rows * shape.chunks() * RECORD
}

/// Chooses the next token of every row that is at a position: writes it, and the position that
/// follows or how the row ended.
///
/// Nothing else depends on what the buffers hold, so that the launches can be recorded once and
/// replayed.
///
/// # Errors
/// An error of [`check_device`], a buffer of the wrong length, operands past what 32-bit indices
/// reach, or a dtype that the device lacks.
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
    let [words, chunks] = [shape.bitmap_words(), shape.chunks()].map(|length| length as u32);
    let lengths = || {
        LengthsLaunch::new(
            vocab as u32,
            chunks,
            words,
            u32::try_from(max_len).unwrap_or(u32::MAX),
        )
    };
    // Rows of other lengths do not all start where four logits can be read at once.
    let lanes = if vocab.is_multiple_of(4) { 4 } else { 1 };
    let [score_units, choose_units] = [SCORE_UNITS, CHOOSE_UNITS].map(|most| units(client, most));
    let is_loose = !matches!(Target::of(client).runtime, Runtime::Cuda | Runtime::Cpu);
    let [logits, logits_again] = twice("logits", shape, args.logits)?;
    let [state, state_again] = twice("state", shape, args.state)?;
    let [bitmaps, bitmaps_again] = twice("bitmaps of tokens", shape, args.bitmaps)?;
    let [records, records_again] = twice("workspace", shape, args.workspace)?;
    let overlaps = overlap::is_supported(client);
    kernel::score::launch(
        client,
        CubeCount::new_1d(rows as u32 * chunks),
        CubeDim::new_1d(score_units),
        lanes,
        logits,
        state,
        bitmaps,
        records,
        lengths(),
        lanes,
        score_units as usize,
        is_loose,
        overlaps,
        dtype.elem(),
    );
    overlap::follow(client);
    kernel::choose::launch(
        client,
        CubeCount::new_1d(rows as u32),
        CubeDim::new_1d(choose_units),
        lanes,
        logits_again,
        state_again,
        bitmaps_again,
        records_again,
        lengths(),
        lanes,
        choose_units as usize,
        blocks,
        is_loose,
        overlaps,
        dtype.elem(),
    );
    overlap::follow(client);
    Ok(())
}

/// Units of a cube: a power of two, as the reductions need.
fn units(client: &Client, most: u32) -> u32 {
    1 << most
        .min(client.properties().hardware.max_units_per_cube)
        .ilog2()
}

/// Checks that a device can sample; the blocks of 32 tokens that its shortlist has room for.
///
/// # Errors
/// [`KernelError::Vocabulary`] for one of no tokens or past 2^18, [`KernelError::Shape`] where the
/// device has no integers of 64 bits, or too little shared memory for the vocabulary.
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
    // One size for all vocabularies where there is room, so that they share a kernel. Some bytes
    // are lost to alignment.
    let fits = |blocks: &usize| sums + shared_bytes(*blocks) + 64 <= shared_memory(client);
    let blocks = [MAX_BLOCKS, shape.chunks() * CHUNK_BLOCKS]
        .into_iter()
        .find(fits);
    blocks.ok_or_else(|| refuse("the device has too little shared memory for the vocabulary"))
}

/// An operand for both launches.
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
    // SAFETY: the same buffer and length as it came with.
    Ok([binding.clone(), binding]
        .map(|binding| unsafe { BufferArg::from_raw_parts_binding(binding, length) }))
}

/// Checks everything that the kernels assume, but for what the state's rows hold.
fn check(client: &Client, shape: &SampleShape, args: &SampleArgs) -> Result<(), KernelError> {
    let SampleShape {
        rows,
        vocab,
        slots,
        dtype,
        ..
    } = *shape;
    let elements = rows
        .saturating_mul(vocab)
        .max(slots.saturating_mul(BITMAPS * shape.bitmap_words()));
    expect_at_most(shape, elements, MAX_ELEMENTS)?;
    dtype.expect_on(client)?;
    expect_length(shape, "logits", rows * vocab, args.logits.len())?;
    expect_length(shape, "state", rows * Row::WORDS, args.state.len())?;
    expect_length(
        shape,
        "bitmaps of tokens",
        slots * BITMAPS * shape.bitmap_words(),
        args.bitmaps.len(),
    )?;
    expect_at_least(
        shape,
        "workspace",
        workspace_words(shape),
        args.workspace.len(),
    )
}
