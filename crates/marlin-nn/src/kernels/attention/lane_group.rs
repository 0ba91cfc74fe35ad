//! The lane group: the parts of a head that its lanes hold, and reductions over its lanes.

use super::block::WorkTile;
use super::config::AttentionConfig;
use super::shape::VECTOR;
use crate::cache::e4m3::{decode, row_scale};
use crate::cache::{CacheFormat, CacheLengths, position_start};
use cubecl::prelude::*;
use marlin_kernels::planes::plane_total;

/// The number of elements of a vector.
pub(super) type N = Const<VECTOR>;
/// A vector of f32 elements.
pub(super) type F8 = Vector<f32, N>;

/// Loads the lane's vectors of keys or values at the lane group's positions of a tile, and their
/// scales if the format has scales. Past the end of the split, loads the last position again.
#[cube]
pub(super) fn load<H: Numeric, W: Size>(
    cache: &[Vector<H, W>],
    pages: &ComptimeOption<&[i32]>,
    held: &mut Array<Vector<H, W>>,
    scales: &mut Array<f32>,
    first: u32,
    place: &WorkTile,
    lengths: &CacheLengths,
    #[comptime] config: AttentionConfig,
) {
    let (vectors, count) = comptime!((config.row_vectors() as u32, config.lane_vectors()));
    #[unroll(config.unrolls())]
    for i in 0..config.positions {
        let position = min(
            first + u32::cast_from(i) * comptime!(config.lane_groups() as u32) + place.lane_group,
            place.end - 1,
        );
        let start = position_start::<usize>(
            pages,
            place.slot,
            place.kv_head,
            position,
            lengths,
            config.page_size,
            vectors,
        );
        #[unroll(config.unrolls())]
        for j in 0..count {
            held[i * count + j] = cache[start + lane_vector(j, place, config) as usize];
        }
        if comptime!(config.format == CacheFormat::E4m3) {
            scales[i] = row_scale(cache[start + comptime!(config.vectors())]);
        }
    }
}

/// Returns the index of the lane's `j`th vector in a head. A lane without a `j`th vector gets the
/// index of the last vector, and takes 0 for its part of q ([`staged_vector`]).
#[cube]
pub(super) fn lane_vector(j: usize, place: &WorkTile, #[comptime] config: AttentionConfig) -> u32 {
    let vector = u32::cast_from(j) * comptime!(config.lanes as u32) + place.lane;
    if comptime!(config.is_even()) {
        vector
    } else {
        min(vector, comptime!(config.vectors() as u32 - 1))
    }
}

/// Returns true if the lane has a `j`th vector.
#[cube]
pub(super) fn has_vector(j: usize, place: &WorkTile, #[comptime] config: AttentionConfig) -> bool {
    u32::cast_from(j) * comptime!(config.lanes as u32) + place.lane
        < comptime!(config.vectors() as u32)
}

/// Reads a vector of a buffer, converted to f32.
#[cube]
pub(super) fn vector<F: Float>(
    buffer: &[F],
    vector: usize,
    #[comptime] config: AttentionConfig,
) -> F8 {
    let mut elements = F8::new(0.0);
    if comptime!(config.has_views) {
        elements = F8::cast_from(buffer.as_vectorized().with_vector_size::<N>()[vector]);
    } else {
        #[unroll]
        for i in 0..VECTOR {
            elements.insert(i, f32::cast_from(buffer[vector * VECTOR + i]));
        }
    }
    elements
}

/// Reads a vector from shared memory.
#[cube]
pub(super) fn shared_vector(
    shared: &Shared<[f32]>,
    vector: usize,
    #[comptime] config: AttentionConfig,
) -> F8 {
    let mut elements = F8::new(0.0);
    if comptime!(config.has_views) {
        elements = shared.as_vectorized().with_vector_size::<N>()[vector];
    } else {
        #[unroll]
        for i in 0..VECTOR {
            elements.insert(i, shared[vector * VECTOR + i]);
        }
    }
    elements
}

/// Writes a vector to shared memory.
#[cube]
pub(super) fn set_shared_vector(
    shared: &mut Shared<[f32]>,
    vector: usize,
    elements: F8,
    #[comptime] config: AttentionConfig,
) {
    if comptime!(config.has_views) {
        let shared = shared.as_vectorized_mut().with_vector_size_mut::<N>();
        shared[vector] = elements;
    } else {
        #[unroll]
        for i in 0..VECTOR {
            shared[vector * VECTOR + i] = elements.extract(i);
        }
    }
}

/// Reads the lane's `j`th vector of a staged head; zeros if the lane has no `j`th vector.
#[cube]
pub(super) fn staged_vector(
    staged: &Shared<[f32]>,
    head: usize,
    j: usize,
    place: &WorkTile,
    #[comptime] config: AttentionConfig,
) -> F8 {
    let vector = shared_vector(
        staged,
        head * comptime!(config.vectors()) + lane_vector(j, place, config) as usize,
        config,
    );
    if comptime!(config.is_even()) {
        vector
    } else {
        select(has_vector(j, place, config), vector, F8::new(0.0))
    }
}

/// Converts a stored vector of keys or values ([`KeyValueType`](super::config::KeyValueType)) to
/// f32, without its scale.
#[cube]
pub(super) fn widen<F: Float, H: Numeric, W: Size>(
    held: Vector<H, W>,
    #[comptime] config: AttentionConfig,
) -> F8 {
    if comptime!(config.format == CacheFormat::E4m3) {
        decode(held, config.as_f16)
    } else {
        F8::cast_from(Vector::<F, N>::reinterpret(held))
    }
}

/// Returns a value times a scale of a tile, if the format has scales.
#[cube]
pub(super) fn scaled(
    value: f32,
    scales: &Array<f32>,
    position: usize,
    #[comptime] config: AttentionConfig,
) -> f32 {
    if comptime!(config.format == CacheFormat::E4m3) {
        value * scales[position]
    } else {
        value
    }
}

/// Rounds elements to the dtype of the cache and returns them as they are stored
/// ([`KeyValueType`](super::config::KeyValueType)).
#[cube]
pub(super) fn narrow<F: Float, H: Numeric, W: Size>(elements: F8) -> Vector<H, W> {
    Vector::<H, W>::reinterpret(Vector::<F, N>::cast_from(elements))
}

/// Returns `sum` plus the dot product of two vectors.
#[cube]
pub(super) fn add_dot(sum: f32, a: F8, b: F8) -> f32 {
    let mut sum = sum;
    #[unroll]
    for i in 0..VECTOR {
        sum += a.extract(i) * b.extract(i);
    }
    sum
}

/// Returns the sum over the lanes of the lane group, in every lane.
#[cube]
pub(super) fn lane_group_sum(value: f32, #[comptime] config: AttentionConfig) -> f32 {
    plane_total(value, config.lanes)
}

/// Returns the largest value among the lanes of the lane group, in every lane.
#[cube]
pub(super) fn lane_group_max(value: f32, #[comptime] config: AttentionConfig) -> f32 {
    let mut most = value;
    #[unroll]
    for i in 0..comptime!(config.lanes.ilog2()) {
        most = max(most, plane_shuffle_xor(most, comptime!(1u32 << i)));
    }
    most
}
