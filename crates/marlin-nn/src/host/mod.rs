//! The operations of a decode step other than its quantised matmuls, in Rust on the CPU. Values
//! have the dtype of the activations; arithmetic is in f32.

use crate::cache::CacheShape;
use crate::kernels::attention::AttentionShape;
use crate::kernels::{SequenceState, SequenceStatus};
use marlin_kernels::Epilogue;
use marlin_kernels::matmul::host::HostFloat;
use marlin_kernels::matmul::host::lm_head::dot;
use marlin_kernels::matmul::host::simd::{Kernel, LANES, Simd, dispatch};
use marlin_kernels::matmul::host::threads::{Columns, for_each};

#[cfg(test)]
mod tests;

/// Returns the RMSNorm of each row of `x` [rows, features], times `weight`. Values are rounded to
/// the dtype before and after the weight is applied.
///
/// # Panics
/// Panics if the length of `x` is not a multiple of the weight's.
pub fn rms_norm<T: HostFloat>(x: &[T], weight: &[T], epsilon: f64) -> Vec<T> {
    let features = weight.len().max(1);
    assert!(
        x.len().is_multiple_of(features),
        "{} values are no rows of {features}",
        x.len()
    );
    let mut out = x.to_vec();
    for row in out.chunks_exact_mut(features) {
        norm_row(row, weight, epsilon);
    }
    out
}

fn norm_row<T: HostFloat>(row: &mut [T], weight: &[T], epsilon: f64) {
    dispatch(NormRow {
        row,
        weight,
        epsilon: epsilon as f32,
    });
}

struct NormRow<'a, T> {
    row: &'a mut [T],
    weight: &'a [T],
    epsilon: f32,
}

impl<T: HostFloat> Kernel for NormRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let features = self.row.len();
        let (row, rest) = self.row.as_chunks_mut::<LANES>();
        let (weight, weight_rest) = self.weight.as_chunks::<LANES>();
        let mut squares = simd.splat(0.0);
        for x in row.iter() {
            let x = T::load(simd, x);
            squares = simd.mul_add(x, x, squares);
        }
        let squares = simd.sum(squares) + rest.iter().map(|x| x.to_f32() * x.to_f32()).sum::<f32>();
        let scale = 1.0 / (squares / features as f32 + self.epsilon).sqrt();
        for (x, weight) in row.iter_mut().zip(weight) {
            T::store(simd, simd.mul(T::load(simd, x), simd.splat(scale)), x);
            T::store(simd, simd.mul(T::load(simd, x), T::load(simd, weight)), x);
        }
        for (x, weight) in rest.iter_mut().zip(weight_rest) {
            let normalised = T::from_f32(x.to_f32() * scale);
            *x = T::from_f32(normalised.to_f32() * weight.to_f32());
        }
    }
}

/// Returns the outputs [rows, features] of a gated epilogue, of `gate_up` [rows, 2 * features]. The
/// gates are the first half of a row.
pub fn gated<T: HostFloat>(gate_up: &[T], features: usize, epilogue: Epilogue) -> Vec<T> {
    const PART: usize = 256;
    let mut out = vec![T::default(); gate_up.len() / 2];
    let (rows, parts) = (
        gate_up.len() / (2 * features).max(1),
        features.div_ceil(PART),
    );
    let columns = Columns::new(&mut out, features);
    // An exponential takes as long as tens of multiplications.
    for_each(rows * parts, 16 * gate_up.len(), |task| {
        let (row, first) = (task / parts, task % parts * PART);
        let width = PART.min(features - first);
        let (gates, ups) = gate_up[2 * row * features..][..2 * features].split_at(features);
        // SAFETY: each task writes only its own part of a row.
        let out = unsafe { columns.part(row, first, width) };
        for ((out, gate), up) in out.iter_mut().zip(&gates[first..]).zip(&ups[first..]) {
            *out = T::from_f32(epilogue.gated(gate.to_f32(), up.to_f32()));
        }
    });
    out
}

/// The attention of a layer: its shape and its parameters.
pub struct Attention<'a, T> {
    /// The shape, checked by [`AttentionShape::check`].
    pub shape: AttentionShape,
    /// The page table [slots, pages of a slot], if the cache has pages.
    pub pages: Option<&'a [i32]>,
    /// The table of cosines [max_positions, rotary_dim / 2].
    pub cos: &'a [f32],
    /// The table of sines, in the same shape as `cos`.
    pub sin: &'a [f32],
    /// The weights `[head_dim]` of the RMSNorms of query heads and of key heads, if the model has
    /// such norms.
    pub norms: Option<[&'a [T]; 2]>,
    /// The scores of heads without a position, `[heads]`, if the model has such scores.
    pub sinks: Option<&'a [T]>,
}

impl<T: HostFloat> Attention<'_, T> {
    /// Computes the attention of a step, as [`crate::kernels::attention`] defines it. Writes the
    /// keys and values of `qkv` [rows, (heads + 2 * kv_heads) * head_dim] to the caches `keys` and
    /// `values` ([`CacheShape::dims`]). Returns the output [rows, heads * head_dim],
    /// with zeros for skipped rows.
    ///
    /// # Panics
    /// Panics if a buffer is shorter than the shape requires.
    pub fn run(
        &self,
        qkv: &[T],
        rows: &[SequenceState],
        keys: &mut [T],
        values: &mut [T],
    ) -> Vec<T> {
        let AttentionShape { heads, cache, .. } = self.shape;
        let CacheShape {
            slots,
            kv_heads,
            max_len,
            head_dim,
            ..
        } = cache;
        let mut out = vec![T::default(); rows.len() * heads * head_dim];
        let width = (heads + 2 * kv_heads) * head_dim;
        for ((row, qkv), out) in rows
            .iter()
            .zip(qkv.chunks_exact(width))
            .zip(out.chunks_exact_mut(heads * head_dim))
        {
            let SequenceStatus::At(position) = row.status else {
                continue;
            };
            let (slot, position) = (row.slot as usize, position as usize);
            if position >= max_len || slot >= slots {
                continue;
            }
            let (queries, rest) = qkv.split_at(heads * head_dim);
            let (new_keys, new_values) = rest.split_at(kv_heads * head_dim);
            let scale = 1.0 / (head_dim as f32).sqrt();
            let queries: Vec<f32> = queries
                .chunks_exact(head_dim)
                .flat_map(|head| self.rotated(head, 0, position))
                .map(|q| q * scale)
                .collect();
            for head in 0..kv_heads {
                let of_head = head * head_dim..(head + 1) * head_dim;
                let rotated = self.rotated(&new_keys[of_head.clone()], 1, position);
                for place in cache.runs(self.pages, [slot, head], position..position + 1) {
                    keys[place.clone()]
                        .iter_mut()
                        .zip(&rotated)
                        .for_each(|(key, &value)| *key = T::from_f32(value));
                    values[place].copy_from_slice(&new_values[of_head.clone()]);
                }
            }
            let first = self
                .shape
                .window
                .map_or(0, |window| (position + 1).saturating_sub(window));
            let (keys, values, group) = (&*keys, &*values, heads / kv_heads);
            let out = Columns::new(out, group * head_dim);
            for_each(
                kv_heads,
                2 * queries.len() * (position + 1 - first),
                |head| {
                    let (of_keys, of_values): (Vec<&[T]>, Vec<&[T]>) = cache
                        .runs(self.pages, [slot, head], first..position + 1)
                        .map(|run| (&keys[run.clone()], &values[run]))
                        .unzip();
                    // SAFETY: each task writes only the outputs of the query heads of its own key
                    // head.
                    let out = unsafe { out.part(head, 0, group * head_dim) };
                    let queries = &queries[head * group * head_dim..][..group * head_dim];
                    for (index, (queries, out)) in queries
                        .chunks_exact(head_dim)
                        .zip(out.chunks_exact_mut(head_dim))
                        .enumerate()
                    {
                        let sink = self.sinks.map(|sinks| sinks[head * group + index].to_f32());
                        dispatch(Attend {
                            queries,
                            sink,
                            keys: &of_keys,
                            values: &of_values,
                            out,
                        });
                    }
                },
            );
        }
        out
    }

    /// Returns a head of queries (norm 0) or keys (norm 1) in f32, normalised if the model has
    /// norms, and rotated by a position.
    fn rotated(&self, head: &[T], norm: usize, position: usize) -> Vec<f32> {
        let half = self.shape.rotary_dim / 2;
        let mut head = head.to_vec();
        if let (Some(norms), Some(epsilon)) = (self.norms, self.shape.norm_epsilon) {
            norm_row(&mut head, norms[norm], f64::from(epsilon));
        }
        let mut rotated: Vec<f32> = head.iter().map(|x| x.to_f32()).collect();
        let (first, second) = rotated.split_at_mut(half);
        let (cos, sin) = (
            &self.cos[position * half..][..half],
            &self.sin[position * half..][..half],
        );
        for (((first, second), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            (*first, *second) = (*first * cos - *second * sin, *second * cos + *first * sin);
        }
        rotated
    }
}

/// The attention of one scaled and rotated query head over keys and values [positions, head_dim],
/// in parts of whole positions.
struct Attend<'a, T> {
    queries: &'a [f32],
    /// The head's score without a position.
    sink: Option<f32>,
    keys: &'a [&'a [T]],
    values: &'a [&'a [T]],
    out: &'a mut [T],
}

impl<T: HostFloat> Kernel for Attend<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let head_dim = self.queries.len();
        let elements: usize = self.keys.iter().map(|part| part.len()).sum();
        let mut scores = Vec::with_capacity(elements / head_dim);
        let sink = self.sink.unwrap_or(f32::NEG_INFINITY);
        let mut most = sink;
        for key in self
            .keys
            .iter()
            .flat_map(|part| part.chunks_exact(head_dim))
        {
            let score = dot(simd, self.queries, key);
            most = most.max(score);
            scores.push(score);
        }
        let mut total = (sink - most).exp();
        for score in &mut scores {
            *score = (*score - most).exp();
            total += *score;
        }
        let mut mixed = vec![[0.0f32; LANES]; head_dim.div_ceil(LANES)];
        let values = self.values.iter();
        let values = values.flat_map(|part| part.chunks_exact(head_dim));
        for (&score, value) in scores.iter().zip(values) {
            let weight = simd.splat(score);
            let (value, rest) = value.as_chunks::<LANES>();
            for (mixed, value) in mixed.iter_mut().zip(value) {
                let sum = simd.mul_add(weight, T::load(simd, value), simd.load(mixed));
                simd.store(sum, mixed);
            }
            // A head is a multiple of 8 features, so half a vector may remain.
            for (mixed, value) in mixed[value.len()..].as_flattened_mut().iter_mut().zip(rest) {
                *mixed += score * value.to_f32();
            }
        }
        self.out
            .iter_mut()
            .zip(mixed.as_flattened())
            .for_each(|(out, mixed)| *out = T::from_f32(mixed / total));
    }
}
