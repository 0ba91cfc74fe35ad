//! The kernel that precedes the attention of prompts: it normalises and rotates queries and keys,
//! and writes keys and values to the cache.

use super::SequenceState;
use super::attention::{AttentionShape, AttentionTarget};
use crate::cache::{CacheLengths, CacheLengthsLaunch, position_start};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::{calculate_cube_count_elemwise, ir::ElemType};
use marlin_kernels::KernelError;
use marlin_kernels::pdl::{self, launch_dependents_and_wait};
use marlin_kernels::planes::plane_total;
use marlin_kernels::problem::expect_length;
use marlin_kernels::{Target, vector_size};

/// The number of units of a cube, if the device supports as many.
const UNITS: usize = 256;

/// The operands of [`rope_cache`]: contiguous buffers, aligned to 16 bytes.
pub struct RopeCacheArgs {
    /// The output of the qkv projection [rows, (heads + 2 kv_heads) head_dim]: query heads, key
    /// heads, then value heads.
    pub qkv: BufferArg,
    /// The [`SequenceState`]s of the rows, i32 [rows, [`SequenceState::WORDS`]].
    pub state: BufferArg,
    /// The table of cosines, f32 [max_positions, rotary_dim / 2]. Features `i` and `i +
    /// rotary_dim / 2` of a head are rotated as a pair.
    pub cos: BufferArg,
    /// The table of sines, in the same shape as `cos`.
    pub sin: BufferArg,
    /// The weight of the RMSNorm of query heads, `[head_dim]`; present if and only if the shape has
    /// an epsilon.
    pub q_norm: Option<BufferArg>,
    /// The weight of the RMSNorm of key heads, under the same conditions as `q_norm`.
    pub k_norm: Option<BufferArg>,
    /// The output: normalised and rotated queries [rows, heads head_dim]. Skipped rows are not
    /// written.
    pub queries: BufferArg,
    /// The cache of keys [pages, kv_heads, page_size, head_dim]
    /// ([`CacheShape`](crate::CacheShape)).
    pub keys: BufferArg,
    /// The cache of values, in the same shape as `keys`.
    pub values: BufferArg,
    /// The page table, i32 [slots, pages of a slot]; present if and only if the cache has pages.
    pub pages: Option<BufferArg>,
}

/// The compile-time parameters of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RopeConfig {
    /// The number of vectors of a head.
    vectors: usize,
    /// The number of elements of a vector.
    size: usize,
    /// The number of vectors of half of the rotated features.
    half: usize,
    /// The number of units that process a head together, a power of two: its number of vectors
    /// rounded up, at most a plane.
    lanes: usize,
    /// The number of positions of a page, if the cache has pages.
    page_size: Option<usize>,
}

/// The lengths of a problem, as arguments of the kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct RopeLengths {
    rows: u32,
    heads: u32,
    cache: CacheLengths,
    epsilon: f32,
}

/// Normalises and rotates the queries and keys of rows, and writes keys and values to the rows'
/// slots and positions of the cache. The rows may be any tokens of prompts. Rows that are idle or
/// outside the cache are skipped.
///
/// # Errors
/// Returns an error if [`AttentionShape::check`] rejects the shape, a buffer has the wrong length,
/// norms are given without an epsilon or an epsilon without norms, or the device does not support
/// the dtype.
pub fn rope_cache(
    client: &Client,
    shape: &AttentionShape,
    args: RopeCacheArgs,
) -> Result<(), KernelError> {
    shape.check()?;
    check(client, shape, &args)?;
    if shape.rows == 0 {
        return Ok(());
    }
    // The rotation pairs whole vectors, so half of the rotated features is a multiple of the vector
    // size.
    let size = vector_size(
        client,
        greatest_common_divisor(shape.cache.head_dim, shape.rotary_dim / 2),
        shape.dtype,
    );
    let target = AttentionTarget::of(client);
    let vectors = shape.cache.head_dim / size;
    let lanes = vectors.next_power_of_two().min(1 << target.plane.ilog2());
    let config = RopeConfig {
        vectors,
        size,
        half: shape.rotary_dim / 2 / size,
        lanes,
        page_size: shape.cache.pages.map(|pages| pages.size),
    };
    let units = shape.rows * (shape.heads + 2 * shape.cache.kv_heads) * lanes;
    let dim = CubeDim::new_1d(UNITS.min(target.units).next_multiple_of(lanes) as u32);
    let count = calculate_cube_count_elemwise(client, units, dim);
    let [rows, heads] = [shape.rows, shape.heads].map(|length| length as u32);
    // SAFETY: the lengths of all buffers were checked against the shape that the kernel derives its
    // indices from. The kernel skips rows whose position or slot is outside the cache.
    unsafe {
        rotate_and_write::launch_unchecked(
            client,
            count,
            dim,
            AddressType::from_len(shape.cache_elements() / size),
            size,
            args.qkv,
            args.state,
            args.cos,
            args.sin,
            args.q_norm.into(),
            args.k_norm.into(),
            args.queries,
            args.keys,
            args.values,
            args.pages.into(),
            RopeLengthsLaunch::new(
                rows,
                heads,
                CacheLengthsLaunch::of(&shape.cache),
                shape.norm_epsilon.unwrap_or_default(),
            ),
            config,
            pdl::is_supported(&Target::of(client)),
            shape.dtype.elem(),
        );
    }
    pdl::make_edge_programmatic(client);
    Ok(())
}

/// Checks all assumptions of the kernel about its operands and the device.
fn check(client: &Client, shape: &AttentionShape, args: &RopeCacheArgs) -> Result<(), KernelError> {
    shape.dtype.expect_on(client)?;
    expect_length(
        shape,
        "qkv",
        shape.rows * shape.qkv_columns(),
        args.qkv.len(),
    )?;
    shape.expect_cache(&args.state, &args.keys, &args.values, &args.pages)?;
    shape.expect_parameters([&args.cos, &args.sin], [&args.q_norm, &args.k_norm])?;
    expect_length(
        shape,
        "queries",
        shape.rows * shape.heads * shape.cache.head_dim,
        args.queries.len(),
    )
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// Normalises and rotates one head of q or k of one row, or copies one head of v, with `lanes`
/// units. The heads are in the order of `qkv`. Each unit processes every `lanes`th vector of its
/// head.
#[cube(launch_unchecked, address_type = "dynamic")]
fn rotate_and_write<F: Float, N: Size>(
    qkv: &[Vector<F, N>],
    state: &[i32],
    cos: &[f32],
    sin: &[f32],
    q_norm: ComptimeOption<&[Vector<F, N>]>,
    k_norm: ComptimeOption<&[Vector<F, N>]>,
    queries: &mut [Vector<F, N>],
    keys: &mut [Vector<F, N>],
    values: &mut [Vector<F, N>],
    pages: ComptimeOption<&[i32]>,
    lengths: RopeLengths,
    #[comptime] config: RopeConfig,
    #[comptime] uses_pdl: bool,
    #[define(F)] _dtype: ElemType,
) {
    launch_dependents_and_wait(uses_pdl);
    let (vectors, lanes) = comptime!((config.vectors as u32, config.lanes as u32));
    let unit = u32::cast_from(ABSOLUTE_POS);
    let lane = unit % lanes;
    let heads = lengths.heads + 2 * lengths.cache.kv_heads;
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
    let position = if is_there {
        u32::cast_from(position)
    } else {
        0u32.runtime()
    };
    let first = ((row * heads + head) * vectors) as usize;
    let is_query = head < lengths.heads;
    let is_value = head >= lengths.heads + lengths.cache.kv_heads;

    let mut factor = 1.0f32.runtime();
    if comptime!(q_norm.is_some()) {
        let mut squares = 0.0f32.runtime();
        for j in 0..comptime!(vectors.div_ceil(lanes)) {
            let vector = j * lanes + lane;
            let x = Vector::<f32, N>::cast_from(qkv[first + min(vector, vectors - 1) as usize]);
            let mut sum = 0.0f32.runtime();
            #[unroll]
            for i in 0..config.size {
                sum += x.extract(i) * x.extract(i);
            }
            squares += select(vector < vectors, sum, 0.0f32.runtime());
        }
        squares = plane_total(squares, config.lanes);
        factor = (squares / comptime!((config.vectors * config.size) as f32) + lengths.epsilon)
            .inverse_sqrt();
    }

    if is_there {
        for j in 0..comptime!(vectors.div_ceil(lanes)) {
            let vector = j * lanes + lane;
            if vector < vectors {
                let mut out = qkv[first + vector as usize];
                if !is_value {
                    let x = normalised(qkv, &q_norm, &k_norm, first, vector, factor, is_query);
                    let mut rotated = x;
                    if comptime!(config.half > 0) {
                        let half = comptime!(config.half as u32);
                        if vector < 2 * half {
                            let is_first = vector < half;
                            let partner = select(is_first, vector + half, vector - half);
                            let y =
                                normalised(qkv, &q_norm, &k_norm, first, partner, factor, is_query);
                            let angle = ((position * half + vector % half)
                                * comptime!(config.size as u32))
                                as usize;
                            #[unroll]
                            for i in 0..config.size {
                                let other = select(is_first, -y.extract(i), y.extract(i));
                                rotated.insert(
                                    i,
                                    x.extract(i) * cos[angle + i] + other * sin[angle + i],
                                );
                            }
                        }
                    }
                    out = Vector::<F, N>::cast_from(rotated);
                }
                if is_query {
                    queries[((row * lengths.heads + head) * vectors + vector) as usize] = out;
                } else {
                    let kv_head = (head - lengths.heads) % lengths.cache.kv_heads;
                    let start = position_start::<usize>(
                        &pages,
                        slot,
                        kv_head,
                        position,
                        &lengths.cache,
                        config.page_size,
                        vectors,
                    );
                    let place = start + vector as usize;
                    if is_value {
                        values[place] = out;
                    } else {
                        keys[place] = out;
                    }
                }
            }
        }
    }
}

/// Returns a vector of a head of q or k in f32, normalised if the model has norms.
#[cube]
fn normalised<F: Float, N: Size>(
    qkv: &[Vector<F, N>],
    q_norm: &ComptimeOption<&[Vector<F, N>]>,
    k_norm: &ComptimeOption<&[Vector<F, N>]>,
    first: usize,
    vector: u32,
    factor: f32,
    is_query: bool,
) -> Vector<f32, N> {
    let x = Vector::<f32, N>::cast_from(qkv[first + vector as usize]);
    #[comptime]
    match (q_norm, k_norm) {
        (ComptimeOption::Some(q_norm), ComptimeOption::Some(k_norm)) => {
            let weight = if is_query {
                q_norm[vector as usize]
            } else {
                k_norm[vector as usize]
            };
            x * Vector::<f32, N>::new(factor) * Vector::<f32, N>::cast_from(weight)
        }
        _ => x,
    }
}
