//! The start of the kernel: it normalises and rotates q and the token's key, stores them and the
//! token's value in shared memory, and writes the token's key and value to the cache.

use super::block::{AttentionSizes, WorkTile};
use super::config::AttentionConfig;
use super::lane_group::{
    F8, add_dot, has_vector, lane_group_sum, lane_vector, narrow, shared_vector, vector,
};
use crate::cache::e4m3::{RowScale, encode, largest, poison};
use crate::cache::{CacheLengths, position_start};
use cubecl::prelude::*;

/// Stores the block's query heads of a prompt's token, times 1 / sqrt(head_dim), in shared memory.
#[cube]
pub(super) fn stage_queries<F: Float>(
    queries: &[F],
    staged: &mut Shared<[f32]>,
    place: &WorkTile,
    sizes: &AttentionSizes,
    #[comptime] config: AttentionConfig,
) {
    let first = (place.row * sizes.heads + place.head) * comptime!(config.head_dim as u32);
    let scale = comptime!(1.0 / (config.head_dim as f32).sqrt());
    let elements = comptime!((config.heads * config.head_dim) as u32);
    for round in 0..comptime!(elements.div_ceil(config.threads as u32)) {
        let index = round * comptime!(config.threads as u32) + UNIT_POS_X;
        if index < elements {
            staged[index as usize] = f32::cast_from(queries[(first + index) as usize]) * scale;
        }
    }
}

/// Stores the block's query heads, times 1 / sqrt(head_dim), and the token's key and value in
/// shared memory. The query heads and the key are normalised and rotated; the key is also rounded
/// to the dtype of the cache.
#[cube]
pub(super) fn stage<F: Float>(
    qkv: &[F],
    cos: &[f32],
    sin: &[f32],
    q_norm: &ComptimeOption<&[F]>,
    k_norm: &ComptimeOption<&[F]>,
    staged: &mut Shared<[f32]>,
    place: &WorkTile,
    sizes: &AttentionSizes,
    #[comptime] config: AttentionConfig,
) {
    let (heads, head_dim) = comptime!((config.heads as u32, config.head_dim as u32));
    let half = comptime!(config.rotary_dim as u32 / 2);
    let scale = comptime!(1.0 / (config.head_dim as f32).sqrt());
    let mut norms = Shared::<[f32]>::new_slice(comptime!(config.heads + 1));
    if comptime!(q_norm.is_some()) {
        norm(qkv, &mut norms, place, sizes, config);
        sync_cube();
    }
    let elements = if place.has_token {
        comptime!((heads + 2) * head_dim).runtime()
    } else {
        comptime!(heads * head_dim).runtime()
    };
    let rounds = comptime!((config.heads + 2) * config.head_dim).div_ceil(config.threads);
    // All loads are issued before the first result is used. Threads without an element repeat the
    // last element.
    let mut x = Array::<f32>::new(rounds);
    let mut y = Array::<f32>::new(rounds);
    let mut rope_cos = Array::<f32>::new(rounds);
    let mut rope_sin = Array::<f32>::new(rounds);
    #[unroll(config.unrolls())]
    for round in 0..rounds {
        let index = min(
            u32::cast_from(round) * comptime!(config.threads as u32) + UNIT_POS_X,
            elements - 1,
        );
        let head = index / head_dim;
        let feature = index % head_dim;
        let base = (place.row * (sizes.heads + 2 * sizes.cache.kv_heads)
            + source(head, place, sizes, config))
            * head_dim;
        x[round] = f32::cast_from(qkv[(base + feature) as usize]);
        if comptime!(half > 0) {
            let angle = (place.position * half + feature % half) as usize;
            y[round] = f32::cast_from(qkv[(base + partner(feature, config)) as usize]);
            rope_cos[round] = cos[angle];
            rope_sin[round] = sin[angle];
        }
    }
    #[unroll(config.unrolls())]
    for round in 0..rounds {
        let index = min(
            u32::cast_from(round) * comptime!(config.threads as u32) + UNIT_POS_X,
            elements - 1,
        );
        let head = index / head_dim;
        let feature = index % head_dim;
        let mut rotated = x[round] * norm_weight(q_norm, k_norm, &norms, head, feature, config);
        if comptime!(half > 0) {
            let other = y[round]
                * norm_weight(
                    q_norm,
                    k_norm,
                    &norms,
                    head,
                    partner(feature, config),
                    config,
                );
            let other = select(feature < half, -other, other);
            let is_rotated = feature < comptime!(2 * half);
            rotated = select(
                is_rotated,
                rotated * rope_cos[round] + other * rope_sin[round],
                rotated,
            );
        }
        let key = f32::cast_from(F::cast_from(rotated));
        let token = select(head == heads, key, x[round]);
        staged[index as usize] = select(head < heads, rotated * scale, token);
    }
}

/// Returns the feature that is rotated together with `feature`, or `feature` itself if it is not
/// rotated.
#[cube]
fn partner(feature: u32, #[comptime] config: AttentionConfig) -> u32 {
    let half = comptime!(config.rotary_dim as u32 / 2);
    let other = select(feature < half, feature + half, feature - half);
    select(feature < comptime!(2 * half), other, feature)
}

/// Returns the index of the head of `qkv` from which a staged head is read. The staged heads are
/// the block's query heads, then the key and the value.
#[cube]
fn source(
    head: u32,
    place: &WorkTile,
    sizes: &AttentionSizes,
    #[comptime] config: AttentionConfig,
) -> u32 {
    if head < comptime!(config.heads as u32) {
        place.head + head
    } else {
        sizes.heads + (head - comptime!(config.heads as u32)) * sizes.cache.kv_heads + place.kv_head
    }
}

/// Stores 1 / sqrt(mean of squares + epsilon) of each of the block's query heads, and of the
/// token's key, in `norms`.
#[cube]
fn norm<F: Float>(
    qkv: &[F],
    norms: &mut Shared<[f32]>,
    place: &WorkTile,
    sizes: &AttentionSizes,
    #[comptime] config: AttentionConfig,
) {
    let rows = place.row * (sizes.heads + 2 * sizes.cache.kv_heads);
    #[unroll]
    for round in 0..comptime!((config.heads + 1).div_ceil(config.lane_groups())) {
        // A lane group without a head repeats the last head, because all lanes of a plane must take
        // part in a shuffle.
        let head = min(
            comptime!((round * config.lane_groups()) as u32) + place.lane_group,
            comptime!(config.heads as u32),
        );
        let base = (rows + source(head, place, sizes, config)) * comptime!(config.vectors() as u32);
        let mut squares = 0.0f32.runtime();
        for j in 0..config.lane_vectors() {
            let x: F8 = vector(qkv, (base + lane_vector(j, place, config)) as usize, config);
            squares = select(
                has_vector(j, place, config),
                add_dot(squares, x, x),
                squares,
            );
        }
        squares = lane_group_sum(squares, config);
        norms[head as usize] =
            (squares * comptime!(1.0 / config.head_dim as f32) + sizes.epsilon).inverse_sqrt();
    }
}

/// Returns the factor by which RMSNorm multiplies a feature of a staged head: 1 without a norm.
#[cube]
fn norm_weight<F: Float>(
    q_norm: &ComptimeOption<&[F]>,
    k_norm: &ComptimeOption<&[F]>,
    norms: &Shared<[f32]>,
    head: u32,
    feature: u32,
    #[comptime] config: AttentionConfig,
) -> f32 {
    #[comptime]
    match (q_norm, k_norm) {
        (ComptimeOption::Some(q_norm), ComptimeOption::Some(k_norm)) => {
            let is_key = head == comptime!(config.heads as u32);
            let weight = if is_key {
                k_norm[feature as usize]
            } else {
                q_norm[feature as usize]
            };
            norms[head as usize] * f32::cast_from(weight)
        }
        _ => 1.0f32.runtime(),
    }
}

/// Writes the token's key and value to the cache.
#[cube]
pub(super) fn write_token<F: Float, H: Numeric, W: Size>(
    keys: &mut [Vector<H, W>],
    values: &mut [Vector<H, W>],
    pages: &ComptimeOption<&[i32]>,
    staged: &Shared<[f32]>,
    place: &WorkTile,
    lengths: &CacheLengths,
    #[comptime] config: AttentionConfig,
) {
    let vectors = comptime!(config.vectors() as u32);
    let start = position_start::<usize>(
        pages,
        place.slot,
        place.kv_head,
        place.position,
        lengths,
        config.page_size,
        vectors,
    );
    for round in 0..comptime!(config.vectors().div_ceil(config.threads) as u32) {
        let vector = round * comptime!(config.threads as u32) + UNIT_POS_X;
        if vector < vectors {
            let index = start + vector as usize;
            let first = comptime!(config.heads as u32) * vectors + vector;
            keys[index] = narrow::<F, H, W>(shared_vector(staged, first as usize, config));
            values[index] =
                narrow::<F, H, W>(shared_vector(staged, (first + vectors) as usize, config));
        }
    }
}

/// Writes the token's key and value to a cache in e4m3
/// ([`CacheFormat::E4m3`](crate::cache::CacheFormat)).
#[cube]
pub(super) fn write_codes<H: Numeric, W: Size>(
    keys: &mut [Vector<H, W>],
    values: &mut [Vector<H, W>],
    pages: &ComptimeOption<&[i32]>,
    staged: &Shared<[f32]>,
    place: &WorkTile,
    lengths: &CacheLengths,
    #[comptime] config: AttentionConfig,
) {
    let vectors = comptime!(config.vectors() as u32);
    let start = position_start::<usize>(
        pages,
        place.slot,
        place.kv_head,
        place.position,
        lengths,
        config.page_size,
        comptime!(config.row_vectors() as u32),
    );
    for round in 0..comptime!((2 * config.vectors()).div_ceil(config.threads) as u32) {
        let index = round * comptime!(config.threads as u32) + UNIT_POS_X;
        if index < 2 * vectors {
            let first = (comptime!(config.heads as u32) + index / vectors) * vectors;
            // Each thread reads the whole head, which takes less time than a reduction.
            let mut most = 0.0f32.runtime();
            let mut not_finite = 0.0f32.runtime();
            for other in 0..vectors {
                let of_head = shared_vector(staged, (first + other) as usize, config);
                most = largest(of_head, most);
                not_finite = poison(of_head, not_finite);
            }
            let scale = RowScale::new(most, not_finite);
            let vector = index % vectors;
            let elements = shared_vector(staged, (first + vector) as usize, config);
            let codes = Vector::<H, W>::reinterpret(encode(elements, &scale));
            let last = Vector::<H, W>::reinterpret(scale.words());
            let to = start + vector as usize;
            let end = start + comptime!(config.vectors());
            if index < vectors {
                keys[to] = codes;
                if vector == 0 {
                    keys[end] = last;
                }
            } else {
                values[to] = codes;
                if vector == 0 {
                    values[end] = last;
                }
            }
        }
    }
}
