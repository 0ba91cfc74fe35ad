use super::config::{CHUNK_K, CHUNK_N, Config};
use super::exchange::{FLAGS_BYTES, MAX_BLOCKS};
use super::kernel::{self, HIGH_NIBBLES, LOW_NIBBLES, LengthsLaunch};
use super::plan::{Card, Launch, Work, format};
use super::tiles::any_format;
use crate::{ActivationDtype, KernelError, Problem};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use marlin_format::layout::{MarlinLayout, ScaleLayout, ZeroLayout};
use marlin_format::{Bits, QuantSpec};

/// Values of a row of activations that are copied at a time.
const RUN: usize = 8;

/// A weight on a device, in the tile layout.
pub struct WeightArgs {
    /// u32 or i32 words of [`layout`].
    pub words: BufferArg,
    /// In the activations' dtype, in [`ScaleLayout`].
    pub scales: BufferArg,
    /// u32 or i32 words of [`ZeroLayout`], from an address that is a multiple of 16 as those of words and scales; absent where symmetric.
    pub zero_points: Option<BufferArg>,
}

/// Operands of [`matmul`].
pub struct MatmulArgs {
    /// [M, K up to a multiple of 8] in the order of the weight's stored rows, zeros past K, contiguous, from an address that is a multiple
    /// of 16: [`repack::arrange`](crate::repack::arrange) makes it where the activations are otherwise.
    pub x: BufferArg,
    /// The weight.
    pub weight: WeightArgs,
    /// `[N]` in the activations' dtype.
    pub bias: Option<BufferArg>,
    /// [M, N], contiguous; written whole.
    pub out: BufferArg,
    /// Where blocks that share a tile meet.
    pub workspace: Workspace,
}

/// Where blocks that share an output tile leave their sums, as `exchange.rs` says: one area for sums with marks, one for sums under flags.
///
/// Marks and flags are zero between launches: the block that reads one clears it. So a workspace is cleared once, when it is made, and belongs
/// to one stream: two launches that may run at the same time need one each.
#[derive(Debug, Clone)]
pub struct Workspace {
    marked: Area,
    flagged: Area,
}

#[derive(Debug, Clone)]
struct Area {
    handle: Handle,
    words: usize,
}

impl Workspace {
    /// A workspace for every launch on `card`.
    pub fn new(client: &Client, card: &Card) -> Self {
        let blocks = card.multiprocessors.min(MAX_BLOCKS);
        let area = |flagged| {
            let configs = any_format(card.capability).filter(|config| config.is_flagged() == flagged);
            let words = configs.map(|config| workspace_words(&config, blocks)).max().unwrap_or(0);
            Area { handle: client.create_from_slice(&vec![0; words * size_of::<u64>()]), words }
        };
        Self { marked: area(false), flagged: area(true) }
    }
}

/// Words of 64 bits that `blocks` blocks exchange their sums in.
fn workspace_words(config: &Config, blocks: usize) -> usize {
    let flags = if config.is_flagged() { FLAGS_BYTES } else { 0 };
    (flags + blocks * config.partial_bytes()).div_ceil(size_of::<u64>())
}

/// Values in a row of activations of `k` features: rows start at multiples of 16 bytes.
pub fn row_length(k: usize) -> usize {
    k.next_multiple_of(RUN)
}

/// The tile layout of a weight of `k` input and `n` output features as this routine reads it: padded to whole chunks.
pub fn layout(k: usize, n: usize) -> MarlinLayout {
    MarlinLayout::in_chunks(k, n)
}

fn lengths(problem: &Problem, launch: &Launch) -> LengthsLaunch {
    let Problem { m, n, k, .. } = *problem;
    let layout = layout(k, n);
    let work = Work::new(problem, &launch.tile);
    let (each, more) = (work.units() / launch.blocks, work.units() % launch.blocks);
    let (chunks_n, chunks_k) = (layout.n_padded() / CHUNK_N, layout.k_padded() / CHUNK_K);
    let k = row_length(k);
    let [m, n, k, chunks_n, chunks_k, row_blocks, depth, each, more] =
        [m, n, k, chunks_n, chunks_k, work.row_blocks, work.depth, each, more].map(|length| length as u32);
    LengthsLaunch::new(m, n, k, chunks_n, chunks_k, row_blocks, depth, depth, each, more, LOW_NIBBLES, HIGH_NIBBLES)
}

/// The activations as the copy engine reads them: a box is a tile's rows of a chunk, which lie in shared memory as `wgmma` reads them.
fn activation_map(problem: &Problem, launch: &Launch, x: BufferArg) -> Result<TensorMapArg<Tiled>, KernelError> {
    let BufferArg::Handle { handle } = x else { return Err(KernelError::Alias { operand: "activations", problem: problem.to_string() }) };
    let (rows, columns) = (problem.m, row_length(problem.k));
    let tensor = TensorBinding { shape: [rows, columns].into(), strides: [columns, 1].into(), ..handle.into_tensor() };
    let boxes = TiledArgs { tile_size: [launch.tile.rows(), CHUNK_K].into() };
    Ok(TensorMapArg::new(boxes, tensor.into_tensor_arg(), problem.activations.elem()).with_swizzle(TensorMapSwizzle::B128))
}

/// Checks what every kernel on the tile layout asks of a problem, and its buffers but for the activations.
pub(super) fn expect_operands(
    problem: &Problem,
    weight: &WeightArgs,
    bias: Option<&BufferArg>,
    out: &BufferArg,
) -> Result<(), KernelError> {
    let Problem { m, n, k, spec, .. } = *problem;
    QuantSpec::check_shape(k, n)?;
    problem.expect_addressable()?;
    if spec.bits != Bits::Four {
        return Err(KernelError::TileBits { bits: spec.bits });
    }
    if problem.activations == ActivationDtype::F32 || problem.scales != problem.activations {
        return Err(KernelError::DtypePair { activations: problem.activations, scales: problem.scales });
    }
    let layout = layout(k, n);
    let zero_points = spec.zero_points.then(|| ZeroLayout::new(&layout, spec.group).words());
    problem.expect_length("output", m * n, out.len())?;
    problem.expect_length("words", layout.words(), weight.words.len())?;
    problem.expect_length("scales", ScaleLayout::new(&layout, spec.group).len(), weight.scales.len())?;
    problem.expect_optional("zero points", zero_points, weight.zero_points.as_ref().map(BufferArg::len))?;
    match bias {
        Some(bias) => problem.expect_length("bias", n, bias.len()),
        None => Ok(()),
    }
}

/// Multiplies activations with a 4-bit weight, as [`plan`](super::plan) says.
///
/// # Errors
/// A weight of 8 bits, a buffer of the wrong length, activations that are an alias of another buffer, an operand that does not fit the format, a
/// launch without blocks, or dtypes that the kernel does not take: activations and scales are both f16 or both bf16.
pub fn matmul(client: &Client, problem: &Problem, launch: Launch, args: MatmulArgs) -> Result<(), KernelError> {
    let Problem { m, n, k, .. } = *problem;
    expect_operands(problem, &args.weight, args.bias.as_ref(), &args.out)?;
    problem.expect_length("activations", m * row_length(k), args.x.len())?;
    if launch.blocks == 0 {
        return Err(KernelError::NoBlocks { problem: problem.to_string() });
    }
    let config = format(problem).config(launch.tile);
    let Workspace { marked, flagged } = args.workspace;
    let Area { handle, words } = if config.is_flagged() { flagged } else { marked };
    problem.expect_at_least("workspace", workspace_words(&config, launch.blocks), words)?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    let (x, x_map) = if config.tile.is_wgmma() { (None, Some(activation_map(problem, &launch, args.x)?)) } else { (Some(args.x), None) };
    // A fault of the device comes up at a later sync and names no kernel: this is what says which was the last.
    tracing::trace!(%problem, tile = %launch.tile, blocks = launch.blocks, "marlin");
    // SAFETY: lengths were checked above against what the kernel derives its addresses from, and the workspace has room for `blocks` parts of
    // tiles.
    unsafe {
        kernel::matmul::launch_unchecked(
            client,
            CubeCount::new_1d(launch.blocks as u32),
            CubeDim::new_1d(config.block_threads() as u32),
            x.into(),
            x_map.into(),
            args.weight.words,
            args.weight.scales,
            args.weight.zero_points.into(),
            args.bias.into(),
            args.out,
            BufferArg::from_raw_parts(handle, words),
            lengths(problem, &launch),
            config,
            problem.activations.elem(),
        );
    }
    Ok(())
}
