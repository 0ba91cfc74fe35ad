//! From the qkv projection's output to q, the token's key and its value: normalised, turned, in shared memory and in the cache.

use super::kernel::{Lengths, Place};
use super::plan::AttentionConfig;
use super::team::{F8, add_dot, has_vector, lane_vector, narrow, shared_vector, team_sum, vector};
use cubecl::prelude::*;

/// Puts the block's heads of q, times 1 / sqrt(head_dim), and the token's key and value into shared memory: normalised, turned and,
/// what goes to the cache, rounded.
#[cube]
pub(super) fn stage<F: Float>(
    qkv: &[F],
    cos: &[f32],
    sin: &[f32],
    q_norm: &ComptimeOption<&[F]>,
    k_norm: &ComptimeOption<&[F]>,
    staged: &mut Shared<[f32]>,
    place: &Place,
    lengths: &Lengths,
    #[comptime] config: AttentionConfig,
) {
    let (heads, head_dim) = comptime!((config.heads as u32, config.head_dim as u32));
    let half = comptime!(config.rotary_dim as u32 / 2);
    let scale = comptime!(1.0 / (config.head_dim as f32).sqrt());
    let mut norms = Shared::<[f32]>::new_slice(comptime!(config.heads + 1));
    if comptime!(q_norm.is_some()) {
        norm(qkv, &mut norms, place, lengths, config);
        sync_cube();
    }
    let elements = if place.has_token { comptime!((heads + 2) * head_dim).runtime() } else { comptime!(heads * head_dim).runtime() };
    let rounds = comptime!((config.heads + 2) * config.head_dim).div_ceil(config.threads);
    // All that is read is asked for before any of it is used. Threads without an element do the last one again.
    let mut x = Array::<f32>::new(rounds);
    let mut y = Array::<f32>::new(rounds);
    let mut turn_cos = Array::<f32>::new(rounds);
    let mut turn_sin = Array::<f32>::new(rounds);
    #[unroll(config.unrolls())]
    for round in 0..rounds {
        let index = min(u32::cast_from(round) * comptime!(config.threads as u32) + UNIT_POS_X, elements - 1);
        let head = index / head_dim;
        let feature = index % head_dim;
        let base = (place.row * (lengths.heads + 2 * lengths.kv_heads) + source(head, place, lengths, config)) * head_dim;
        x[round] = f32::cast_from(qkv[(base + feature) as usize]);
        if comptime!(half > 0) {
            let angle = (place.position * half + feature % half) as usize;
            y[round] = f32::cast_from(qkv[(base + partner(feature, config)) as usize]);
            turn_cos[round] = cos[angle];
            turn_sin[round] = sin[angle];
        }
    }
    #[unroll(config.unrolls())]
    for round in 0..rounds {
        let index = min(u32::cast_from(round) * comptime!(config.threads as u32) + UNIT_POS_X, elements - 1);
        let head = index / head_dim;
        let feature = index % head_dim;
        let mut turned = x[round] * norm_weight(q_norm, k_norm, &norms, head, feature, config);
        if comptime!(half > 0) {
            let other = y[round] * norm_weight(q_norm, k_norm, &norms, head, partner(feature, config), config);
            let other = select(feature < half, -other, other);
            let is_turned = feature < comptime!(2 * half);
            turned = select(is_turned, turned * turn_cos[round] + other * turn_sin[round], turned);
        }
        let key = f32::cast_from(F::cast_from(turned));
        let token = select(head == heads, key, x[round]);
        staged[index as usize] = select(head < heads, turned * scale, token);
    }
}

/// The feature that turns with this one; itself where it does not turn.
#[cube]
fn partner(feature: u32, #[comptime] config: AttentionConfig) -> u32 {
    let half = comptime!(config.rotary_dim as u32 / 2);
    let other = select(feature < half, feature + half, feature - half);
    select(feature < comptime!(2 * half), other, feature)
}

/// Where in a row of qkv a staged head comes from: the block's query heads, then the key's and the value's.
#[cube]
fn source(head: u32, place: &Place, lengths: &Lengths, #[comptime] config: AttentionConfig) -> u32 {
    if head < comptime!(config.heads as u32) {
        place.head + head
    } else {
        lengths.heads + (head - comptime!(config.heads as u32)) * lengths.kv_heads + place.kv_head
    }
}

/// Leaves 1 / sqrt(mean of squares + epsilon) of each of the block's heads of q and of the token's key.
#[cube]
fn norm<F: Float>(qkv: &[F], norms: &mut Shared<[f32]>, place: &Place, lengths: &Lengths, #[comptime] config: AttentionConfig) {
    let rows = place.row * (lengths.heads + 2 * lengths.kv_heads);
    #[unroll]
    for round in 0..comptime!((config.heads + 1).div_ceil(config.teams())) {
        // Teams without a head take the last one again: a shuffle is for whole planes.
        let head = min(comptime!((round * config.teams()) as u32) + place.team, comptime!(config.heads as u32));
        let base = (rows + source(head, place, lengths, config)) * comptime!(config.vectors() as u32);
        let mut squares = 0.0f32.runtime();
        for j in 0..config.lane_vectors() {
            let x: F8 = vector(qkv, (base + lane_vector(j, place, config)) as usize, config);
            squares = select(has_vector(j, place, config), add_dot(squares, x, x), squares);
        }
        squares = team_sum(squares, config);
        norms[head as usize] = (squares * comptime!(1.0 / config.head_dim as f32) + lengths.epsilon).inverse_sqrt();
    }
}

/// What RMSNorm multiplies a feature of a staged head by.
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
            let weight = if is_key { k_norm[feature as usize] } else { q_norm[feature as usize] };
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
    staged: &Shared<[f32]>,
    place: &Place,
    #[comptime] config: AttentionConfig,
) {
    let vectors = comptime!(config.vectors() as u32);
    for round in 0..comptime!(config.vectors().div_ceil(config.threads) as u32) {
        let vector = round * comptime!(config.threads as u32) + UNIT_POS_X;
        if vector < vectors {
            let index = place.cache + (place.position * vectors + vector) as usize;
            let first = comptime!(config.heads as u32) * vectors + vector;
            keys[index] = narrow::<F, H, W>(shared_vector(staged, first as usize, config));
            values[index] = narrow::<F, H, W>(shared_vector(staged, (first + vectors) as usize, config));
        }
    }
}
