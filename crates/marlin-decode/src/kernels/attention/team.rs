//! Teams of lanes: what a lane reads of a head, and sums over a team.

use super::kernel::Place;
use super::plan::AttentionConfig;
use super::shape::VECTOR;
use cubecl::prelude::*;

/// Elements that are read at a time.
pub(super) type N = Const<VECTOR>;
/// Those in f32.
pub(super) type F8 = Vector<f32, N>;

/// Reads the vectors of keys or values that a lane has at the team's positions of a tile. Past the share's end it reads its last position again.
#[cube]
pub(super) fn load<H: Numeric, W: Size>(
    cache: &[Vector<H, W>],
    held: &mut Array<Vector<H, W>>,
    first: u32,
    place: &Place,
    #[comptime] config: AttentionConfig,
) {
    let (vectors, count) = comptime!((config.vectors() as u32, config.lane_vectors()));
    #[unroll(config.unrolls())]
    for i in 0..config.positions {
        let position = min(first + u32::cast_from(i) * comptime!(config.teams() as u32) + place.team, place.end - 1);
        #[unroll(config.unrolls())]
        for j in 0..count {
            let vector = lane_vector(j, place, config);
            held[i * count + j] = cache[place.cache + (position * vectors + vector) as usize];
        }
    }
}

/// The number in its head of a lane's vector. A lane that has none takes the last, whose part of q is then 0.
#[cube]
pub(super) fn lane_vector(j: usize, place: &Place, #[comptime] config: AttentionConfig) -> u32 {
    let vector = u32::cast_from(j) * comptime!(config.lanes as u32) + place.lane;
    if comptime!(config.is_even()) { vector } else { min(vector, comptime!(config.vectors() as u32 - 1)) }
}

#[cube]
pub(super) fn has_vector(j: usize, place: &Place, #[comptime] config: AttentionConfig) -> bool {
    u32::cast_from(j) * comptime!(config.lanes as u32) + place.lane < comptime!(config.vectors() as u32)
}

/// A vector of a buffer's elements, in f32.
#[cube]
pub(super) fn vector<F: Float>(buffer: &[F], vector: usize, #[comptime] config: AttentionConfig) -> F8 {
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

/// A vector in shared memory.
#[cube]
pub(super) fn shared_vector(shared: &Shared<[f32]>, vector: usize, #[comptime] config: AttentionConfig) -> F8 {
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

/// Puts a vector into shared memory.
#[cube]
pub(super) fn set_shared_vector(shared: &mut Shared<[f32]>, vector: usize, elements: F8, #[comptime] config: AttentionConfig) {
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

/// A lane's vector of a staged head, 0 where it has none.
#[cube]
pub(super) fn staged_vector(staged: &Shared<[f32]>, head: usize, j: usize, place: &Place, #[comptime] config: AttentionConfig) -> F8 {
    let vector = shared_vector(staged, head * comptime!(config.vectors()) + lane_vector(j, place, config) as usize, config);
    if comptime!(config.is_even()) { vector } else { select(has_vector(j, place, config), vector, F8::new(0.0)) }
}

/// Elements in f32 of the vector that holds them, which is the elements themselves or their words ([`Held`](super::plan::Held)).
#[cube]
pub(super) fn widen<F: Float, H: Numeric, W: Size>(held: Vector<H, W>) -> F8 {
    F8::cast_from(Vector::<F, N>::reinterpret(held))
}

/// Elements rounded, as they are held.
#[cube]
pub(super) fn narrow<F: Float, H: Numeric, W: Size>(elements: F8) -> Vector<H, W> {
    Vector::<H, W>::reinterpret(Vector::<F, N>::cast_from(elements))
}

/// A sum and the sum of two vectors' products.
#[cube]
pub(super) fn add_dot(sum: f32, a: F8, b: F8) -> f32 {
    let mut sum = sum;
    #[unroll]
    for i in 0..VECTOR {
        sum += a.extract(i) * b.extract(i);
    }
    sum
}

/// The sum over a team's lanes, in every lane.
#[cube]
pub(super) fn team_sum(value: f32, #[comptime] config: AttentionConfig) -> f32 {
    let mut sum = value;
    #[unroll]
    for i in 0..comptime!(config.lanes.ilog2()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << i));
    }
    sum
}

/// The largest value of a team's lanes, in every lane.
#[cube]
pub(super) fn team_max(value: f32, #[comptime] config: AttentionConfig) -> f32 {
    let mut most = value;
    #[unroll]
    for i in 0..comptime!(config.lanes.ilog2()) {
        most = max(most, plane_shuffle_xor(most, comptime!(1u32 << i)));
    }
    most
}
