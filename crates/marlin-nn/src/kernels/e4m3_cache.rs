//! The kernels between a KV cache in e4m3 ([`CacheFormat::E4m3`](crate::CacheFormat)) and the
//! workspace in the dtype of activations, in which the keys and values of prompts are written and
//! read.

use super::SequenceState;
use super::attention::{AttentionShape, AttentionTarget};
use super::flash::{FlashLengths, FlashLengthsLaunch, TILE_WORDS, TileRows};
use crate::cache::e4m3::{RowScale, decode, encode, largest, poison, row_scale};
use crate::cache::{CacheFormat, CacheLengths, CacheLengthsLaunch, position_start};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::{calculate_cube_count_elemwise, ir::ElemType};
use marlin_kernels::pdl::{self, launch_dependents_and_wait};
use marlin_kernels::planes::plane_total;
use marlin_kernels::problem::expect_length;
use marlin_kernels::{ActivationDtype, KernelError, Runtime, Target};

/// The number of units of a cube, if the device supports as many.
pub(super) const UNITS: usize = 256;
/// The number of values of a vector.
const VECTOR: usize = 8;
/// The number of values of a vector, as a type.
type N = Const<VECTOR>;
/// The number of cubes that share the positions of a tile and a head.
const CUBES: u32 = 8;
/// The positions from which a tile's keys are widened are a multiple of this number: the attention
/// of prompts reads blocks of as many, and multiplies the values of positions before the window by
/// 0.
const BLOCK: u32 = 128;

/// The operands of [`store_codes`] and [`widen_codes`]: contiguous buffers, aligned to 16 bytes.
pub struct E4m3CacheArgs {
    /// The [`SequenceState`]s of the rows, i32 [rows, [`SequenceState::WORDS`]].
    pub state: BufferArg,
    /// The tiles of the rows ([`tiles`](super::flash::tiles())), i32 [tiles, [`TILE_WORDS`]].
    pub tiles: BufferArg,
    /// The cache of keys [pages, kv_heads, page_size, row].
    pub keys: BufferArg,
    /// The cache of values, in the same shape as `keys`.
    pub values: BufferArg,
    /// The keys in the dtype of activations, [pages, kv_heads, page_size, head_dim].
    pub wide_keys: BufferArg,
    /// The values in the dtype of activations, in the same shape as `wide_keys`.
    pub wide_values: BufferArg,
    /// The page table, i32 [slots, pages of a slot]; present if and only if the cache has pages.
    pub pages: Option<BufferArg>,
}

/// The compile-time parameters of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct CodesConfig {
    /// The number of vectors of a head.
    vectors: usize,
    /// The number of units that process a head of a position together, a power of two.
    lanes: usize,
    /// The number of positions of a page, if the cache has pages.
    page_size: Option<usize>,
    /// True if codes are converted as pairs of f16.
    as_f16: bool,
}

/// The lengths of a problem, as arguments of the kernels.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct CodesLengths {
    pub(super) rows: u32,
    pub(super) cache: CacheLengths,
}

/// Rounds the keys and values of rows of prompts from the workspace to e4m3, and writes them to the
/// cache. Rows that are idle or outside the cache are skipped.
///
/// # Errors
/// Returns an error if [`AttentionShape::check`] rejects the shape, if the cache has another
/// format, a buffer has the wrong length, or the device does not support the dtype.
pub fn store_codes(
    client: &Client,
    shape: &AttentionShape,
    args: E4m3CacheArgs,
) -> Result<(), KernelError> {
    check(client, shape, &args)?;
    if shape.rows == 0 {
        return Ok(());
    }
    let (target, config) = (AttentionTarget::of(client), CodesConfig::of(client, shape));
    let units = shape.rows * 2 * shape.cache.kv_heads * config.lanes;
    let dim = CubeDim::new_1d(UNITS.min(target.units).next_multiple_of(config.lanes) as u32);
    // SAFETY: the lengths of all buffers were checked against the shape that the kernel derives its
    // indices from. The kernel skips rows whose position or slot is outside the cache.
    unsafe {
        store::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, units, dim),
            dim,
            address_type(shape),
            args.state,
            args.wide_keys,
            args.wide_values,
            args.keys,
            args.values,
            args.pages.into(),
            CodesLengthsLaunch::new(shape.rows as u32, CacheLengthsLaunch::of(&shape.cache)),
            config,
            pdl::is_supported(&Target::of(client)),
            shape.dtype.elem(),
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}

/// Writes the keys and values that rows of prompts attend to from the cache to the workspace.
///
/// # Errors
/// The errors of [`store_codes`].
pub fn widen_codes(
    client: &Client,
    shape: &AttentionShape,
    args: E4m3CacheArgs,
) -> Result<(), KernelError> {
    check(client, shape, &args)?;
    let tiles = args.tiles.len() / TILE_WORDS;
    if shape.rows == 0 || tiles == 0 {
        return Ok(());
    }
    let target = AttentionTarget::of(client);
    let [heads, group] =
        [shape.heads, shape.heads / shape.cache.kv_heads].map(|length| length as u32);
    let window = shape.window.map_or(u32::MAX, |window| window as u32);
    // SAFETY: the lengths of all buffers were checked against the shape that the kernel derives its
    // indices from. The kernel skips tiles whose positions or slot are outside the cache.
    unsafe {
        widen::launch_unchecked(
            client,
            CubeCount::new_3d(tiles as u32, 2 * shape.cache.kv_heads as u32, CUBES),
            CubeDim::new_1d(UNITS.min(target.units) as u32),
            address_type(shape),
            args.state,
            args.tiles,
            args.keys,
            args.values,
            args.wide_keys,
            args.wide_values,
            args.pages.into(),
            FlashLengthsLaunch::new(heads, group, CacheLengthsLaunch::of(&shape.cache), window),
            CodesConfig::of(client, shape),
            pdl::is_supported(&Target::of(client)),
            shape.dtype.elem(),
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}

impl CodesConfig {
    pub(super) fn new(
        head_dim: usize,
        page_size: Option<usize>,
        target: &AttentionTarget,
        as_f16: bool,
    ) -> Self {
        let vectors = head_dim / VECTOR;
        Self {
            vectors,
            lanes: vectors.next_power_of_two().min(1 << target.plane.ilog2()),
            page_size,
            as_f16,
        }
    }

    fn of(client: &Client, shape: &AttentionShape) -> Self {
        let page_size = shape.cache.pages.map(|pages| pages.size);
        let as_f16 = Target::of(client).runtime == Runtime::Cuda;
        let target = AttentionTarget::of(client);
        Self::new(shape.cache.head_dim, page_size, &target, as_f16)
    }
}

/// Returns the type of indices into the workspace, which has more vectors than the cache has, and
/// into the cache.
fn address_type(shape: &AttentionShape) -> AddressType {
    AddressType::from_len(shape.cache_elements() / (VECTOR / 2))
}

/// Checks all assumptions of the kernels about their operands and the device.
fn check(client: &Client, shape: &AttentionShape, args: &E4m3CacheArgs) -> Result<(), KernelError> {
    shape.check()?;
    shape.dtype.expect_on(client)?;
    if shape.cache.format != CacheFormat::E4m3 || shape.dtype == ActivationDtype::F32 {
        return Err(KernelError::Shape {
            problem: shape.to_string(),
            reason: "only a cache in e4m3 is converted",
        });
    }
    shape.expect_cache(&args.state, &args.keys, &args.values, &args.pages)?;
    let wide = shape.cache.in_activations().elements();
    expect_length(shape, "wide keys", wide, args.wide_keys.len())?;
    expect_length(shape, "wide values", wide, args.wide_values.len())
}

/// Rounds one head of the keys or values of one row, with `lanes` units.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn store<F: Float>(
    state: &[i32],
    wide_keys: &[Vector<F, N>],
    wide_values: &[Vector<F, N>],
    keys: &mut [Vector<u32, Const<2>>],
    values: &mut [Vector<u32, Const<2>>],
    pages: ComptimeOption<&[i32]>,
    lengths: CodesLengths,
    #[comptime] config: CodesConfig,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let (vectors, lanes) = comptime!((config.vectors as u32, config.lanes as u32));
    let unit = u32::cast_from(ABSOLUTE_POS);
    let lane = unit % lanes;
    let heads = 2 * lengths.cache.kv_heads;
    // Units past the last row repeat that row without writing, because all lanes of a plane must
    // take part in a shuffle.
    let own_row = unit / lanes / heads;
    let row = min(own_row, lengths.rows - 1);
    let head = unit / lanes % heads;
    let words = row * comptime!(SequenceState::WORDS as u32);
    let position = state[(words + comptime!(SequenceState::POSITION as u32)) as usize];
    let slot = u32::cast_from(state[(words + comptime!(SequenceState::SLOT as u32)) as usize]);
    let is_there = own_row < lengths.rows
        && position >= 0
        && u32::cast_from(position) < lengths.cache.max_len
        && slot < lengths.cache.slots;
    let position = select(is_there, u32::cast_from(position), 0u32.runtime());
    let slot = select(is_there, slot, 0u32.runtime());
    let is_value = head >= lengths.cache.kv_heads;
    let kv_head = head % lengths.cache.kv_heads;
    let from = position_start::<usize>(
        &pages,
        slot,
        kv_head,
        position,
        &lengths.cache,
        config.page_size,
        vectors,
    );
    let mut most = 0.0f32.runtime();
    let mut not_finite = 0.0f32.runtime();
    for j in 0..comptime!(vectors.div_ceil(lanes)) {
        let vector = from + min(j * lanes + lane, vectors - 1) as usize;
        let wide = read(wide_keys, wide_values, vector, is_value);
        most = largest(wide, most);
        not_finite = poison(wide, not_finite);
    }
    #[unroll]
    for i in 0..comptime!(config.lanes.ilog2()) {
        most = max(most, plane_shuffle_xor(most, comptime!(1u32 << i)));
    }
    let scale = RowScale::new(most, plane_total(not_finite, config.lanes));
    if is_there {
        let to = position_start::<usize>(
            &pages,
            slot,
            kv_head,
            position,
            &lengths.cache,
            config.page_size,
            comptime!(vectors + 1),
        );
        for j in 0..comptime!(vectors.div_ceil(lanes)) {
            let vector = j * lanes + lane;
            if vector < vectors {
                let wide = read(wide_keys, wide_values, from + vector as usize, is_value);
                let codes = encode(wide, &scale);
                if is_value {
                    values[to + vector as usize] = codes;
                } else {
                    keys[to + vector as usize] = codes;
                }
            }
        }
        if lane == 0 {
            if is_value {
                values[to + comptime!(config.vectors)] = scale.words();
            } else {
                keys[to + comptime!(config.vectors)] = scale.words();
            }
        }
    }
}

/// Reads a vector of keys or of values.
#[cube]
fn read<F: Float>(
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    vector: usize,
    is_value: bool,
) -> Vector<f32, N> {
    let wide = if is_value {
        values[vector]
    } else {
        keys[vector]
    };
    Vector::<f32, N>::cast_from(wide)
}

/// Widens one head of the keys or values that a tile attends to and no tile of the same prompt
/// before it. The cubes of a tile and a head share its positions.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn widen<F: Float>(
    state: &[i32],
    tiles: &[i32],
    keys: &[Vector<u32, Const<2>>],
    values: &[Vector<u32, Const<2>>],
    wide_keys: &mut [Vector<F, N>],
    wide_values: &mut [Vector<F, N>],
    pages: ComptimeOption<&[i32]>,
    lengths: FlashLengths,
    #[comptime] config: CodesConfig,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let tile = TileRows::read(tiles, state, CUBE_POS_X, &lengths);
    if tile.count == 0 {
        terminate!();
    }
    let mut first = tile.first_key(&lengths, BLOCK);
    if tile.follows(state) {
        first = tile.position;
    }
    let vectors = comptime!(config.vectors as u32);
    let is_value = CUBE_POS_Y >= lengths.cache.kv_heads;
    let kv_head = CUBE_POS_Y % lengths.cache.kv_heads;
    let end = (tile.end() - first) * vectors;
    let mut index = CUBE_POS_Z * CUBE_DIM_X + UNIT_POS_X;
    while index < end {
        let (position, vector) = (first + index / vectors, index % vectors);
        let from = position_start::<usize>(
            &pages,
            tile.slot,
            kv_head,
            position,
            &lengths.cache,
            config.page_size,
            comptime!(vectors + 1),
        );
        let to = position_start::<usize>(
            &pages,
            tile.slot,
            kv_head,
            position,
            &lengths.cache,
            config.page_size,
            vectors,
        ) + vector as usize;
        let code = from + vector as usize;
        let last = from + comptime!(config.vectors);
        if is_value {
            let scale = Vector::<f32, N>::new(row_scale(values[last]));
            wide_values[to] = Vector::cast_from(decode(values[code], config.as_f16) * scale);
        } else {
            let scale = Vector::<f32, N>::new(row_scale(keys[last]));
            wide_keys[to] = Vector::cast_from(decode(keys[code], config.as_f16) * scale);
        }
        index += CUBES * CUBE_DIM_X;
    }
}
