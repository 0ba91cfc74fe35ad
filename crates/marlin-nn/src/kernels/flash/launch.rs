use super::config::{FlashConfig, FlashLengthsLaunch};
use super::tiles::{TILE_ROWS, TILE_WORDS};
use super::{mma_sync, wgmma};
use crate::cache::CacheLengthsLaunch;
use crate::kernels::attention::AttentionShape;
use cubecl::client::Client;
use cubecl::prelude::*;
use marlin_kernels::device::{MIN_CAPABILITY, WGMMA_CAPABILITY};
use marlin_kernels::pdl;
use marlin_kernels::problem::expect_length;
use marlin_kernels::swizzled_map;
use marlin_kernels::{ActivationDtype, KernelError, Target};

/// The maximum number of features of a head.
const MAX_HEAD_DIM: usize = 256;

/// The operands of [`flash`]: contiguous buffers, aligned to 16 bytes.
pub struct FlashArgs {
    /// The queries [rows, heads head_dim], normalised and rotated.
    pub queries: BufferArg,
    /// The [`SequenceState`](crate::kernels::SequenceState)s, i32 [rows,
    /// [`SequenceState::WORDS`](crate::kernels::SequenceState::WORDS)].
    pub state: BufferArg,
    /// The tiles of the rows ([`tiles`](super::tiles())), i32 [tiles, [`TILE_WORDS`]].
    pub tiles: BufferArg,
    /// The cache of keys [pages, kv_heads, page_size, head_dim]
    /// ([`CacheShape`](crate::CacheShape)), normalised and rotated. It already contains the keys of
    /// the rows' own positions.
    pub keys: BufferArg,
    /// The cache of values, in the same shape as `keys`.
    pub values: BufferArg,
    /// The page table, i32 [slots, pages of a slot]; present if and only if the cache has pages.
    pub pages: Option<BufferArg>,
    /// A score of each query head without a position, `[heads]`; present if and only if the shape
    /// has them.
    pub sinks: Option<BufferArg>,
    /// The output [rows, heads head_dim]; rows in no tile are not written.
    pub out: BufferArg,
}

/// Returns true if [`flash`] takes heads of `head_dim` features in a dtype on a device.
pub fn takes(target: &Target, dtype: ActivationDtype, head_dim: usize) -> bool {
    target.capability() >= MIN_CAPABILITY
        && dtype != ActivationDtype::F32
        && head_dim.is_multiple_of(16)
        && head_dim <= MAX_HEAD_DIM
}

/// Attends from each row of prompts to the positions of its slot up to the row's own. Skips rows
/// that are in no tile, and tiles outside the cache.
///
/// # Errors
/// Returns an error if [`AttentionShape::check`] rejects the shape, if [`takes`] returns false, or
/// if a buffer has the wrong length.
pub fn flash(client: &Client, shape: &AttentionShape, args: FlashArgs) -> Result<(), KernelError> {
    shape.check()?;
    let target = Target::of(client);
    if !takes(&target, shape.dtype, shape.cache.head_dim) {
        let reason = "this attention needs CUDA, compute capability 8.0, f16 or bf16, and a head_dim of 16 to 256, a multiple of 16";
        return Err(KernelError::Shape {
            problem: shape.to_string(),
            reason,
        });
    }
    let outputs = shape.rows * shape.heads * shape.cache.head_dim;
    let count = args.tiles.len() / TILE_WORDS;
    shape.expect_cache(&args.state, &args.keys, &args.values, &args.pages)?;
    shape.expect_sinks(&args.sinks)?;
    for (operand, expected, found) in [
        ("queries", outputs, &args.queries),
        ("tiles", count * TILE_WORDS, &args.tiles),
        ("output", outputs, &args.out),
    ] {
        expect_length(shape, operand, expected, found.len())?;
    }
    if count == 0 || shape.rows == 0 {
        return Ok(());
    }
    let [heads, group, tiles] =
        [shape.heads, shape.heads / shape.cache.kv_heads, count].map(|length| length as u32);
    let window = shape.window.map_or(u32::MAX, |window| window as u32);
    let config = FlashConfig {
        head_dim: shape.cache.head_dim,
        bf16: shape.dtype == ActivationDtype::BF16,
        page_size: shape.cache.pages.map(|pages| pages.size),
    };
    let lengths =
        FlashLengthsLaunch::new(heads, group, CacheLengthsLaunch::of(&shape.cache), window);
    let FlashArgs {
        queries,
        state,
        tiles: table,
        keys,
        values,
        pages,
        sinks,
        out,
    } = args;
    // SAFETY: the lengths of all buffers were checked against the shape that the kernels derive
    // their addresses from, and the kernels skip tiles whose positions or slot are outside the
    // cache. The rows of a tile are those of the table that `tiles` makes.
    unsafe {
        if target.capability() == WGMMA_CAPABILITY {
            let map = |matrix, lengths, box_rows| {
                let map = swizzled_map(matrix, lengths, box_rows, shape.dtype);
                map.ok_or_else(|| KernelError::Alias {
                    operand: "queries, keys or values",
                    problem: shape.to_string(),
                })
            };
            let cache = [
                shape.cache_elements() / shape.cache.head_dim,
                shape.cache.head_dim,
            ];
            wgmma::flash_wgmma::launch_unchecked(
                client,
                CubeCount::new_2d(heads, tiles),
                CubeDim::new_1d(wgmma::THREADS as u32),
                map(
                    queries,
                    [shape.rows, shape.heads * shape.cache.head_dim],
                    TILE_ROWS,
                )?,
                map(keys, cache, config.box_keys())?,
                map(values, cache, config.box_keys())?,
                state,
                table,
                pages.into(),
                sinks.into(),
                out,
                lengths,
                config,
                shape.dtype.elem(),
            );
        } else {
            mma_sync::flash::launch_unchecked(
                client,
                CubeCount::new_3d(heads, tiles, 2),
                CubeDim::new_1d(mma_sync::THREADS as u32),
                queries,
                state,
                table,
                keys,
                values,
                pages.into(),
                sinks.into(),
                out,
                lengths,
                config,
                pdl::is_supported(&target),
                shape.dtype.elem(),
            );
        }
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}
