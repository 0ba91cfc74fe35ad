use burn::tensor::{Device, FloatDType, Tensor};
use marlin_nn as decode;

use crate::config::ModelConfig;

/// A KV cache: the keys and values of earlier positions, allocated once for `max_len` positions of
/// each of several sequences.
///
/// New positions are written in place: nothing else holds a layer's tensors between two forward
/// passes.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<KeyValues>,
    len: usize,
    max_len: usize,
}

/// The keys and values of one layer, [slots, kv_heads, max_len, head_dim] each.
#[derive(Debug)]
pub(crate) struct KeyValues {
    pub(crate) keys: Tensor<4>,
    pub(crate) values: Tensor<4>,
}

impl KeyValues {
    /// Creates keys and values of zeros, for `max_len` positions of each of `slots` sequences.
    pub(crate) fn new(
        config: &ModelConfig,
        slots: usize,
        max_len: usize,
        dtype: FloatDType,
        device: &Device,
    ) -> Self {
        let shape = [slots, config.num_key_value_heads, max_len, config.head_dim];
        let zeros = || decode::cache(shape, dtype, device);
        Self {
            keys: zeros(),
            values: zeros(),
        }
    }
}

/// The position of a cache from which new keys and values are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CachePosition {
    /// The slot of the first sequence; others follow in the slots after it.
    pub(crate) slot: usize,
    /// The first position in each of the slots.
    pub(crate) start: usize,
}

impl KvCache {
    /// Creates an empty cache.
    ///
    /// `dtype` is the dtype of activations, and `max_len` is the number of positions of each of
    /// `slots` sequences.
    pub fn new(
        config: &ModelConfig,
        slots: usize,
        max_len: usize,
        dtype: FloatDType,
        device: &Device,
    ) -> Self {
        let layers = (0..config.num_hidden_layers)
            .map(|_| KeyValues::new(config, slots, max_len, dtype, device))
            .collect();
        Self {
            layers,
            len: 0,
            max_len,
        }
    }

    /// Returns the size in bytes of a cache with these sizes.
    pub fn size_bytes(
        config: &ModelConfig,
        slots: usize,
        max_len: usize,
        dtype: FloatDType,
    ) -> usize {
        let shape =
            decode::CacheShape::from([slots, config.num_key_value_heads, max_len, config.head_dim]);
        let size = burn::tensor::DType::from(dtype).size();
        shape
            .elements()
            .saturating_mul(2 * size * config.num_hidden_layers)
    }

    /// Returns the number of positions of each sequence that
    /// [`Model::forward`](super::Model::forward) has written.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the cache holds no position.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of positions that each sequence has room for.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Removes all positions; the memory stays allocated.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Returns the keys and values of a layer.
    pub(crate) fn layer(&mut self, index: usize) -> &mut KeyValues {
        &mut self.layers[index]
    }

    /// Adds to the length the positions that were written to every layer.
    pub(crate) fn advance(&mut self, positions: usize) {
        self.len += positions;
    }
}

impl KeyValues {
    /// Writes keys and values [batch, kv_heads, seq, head_dim] from a position on. Returns the keys
    /// and values of all positions of these slots so far.
    pub(crate) fn append(
        &mut self,
        position: CachePosition,
        keys: Tensor<4>,
        values: Tensor<4>,
    ) -> (Tensor<4>, Tensor<4>) {
        (
            append(&mut self.keys, position, keys),
            append(&mut self.values, position, values),
        )
    }
}

fn append(cache: &mut Tensor<4>, position: CachePosition, new: Tensor<4>) -> Tensor<4> {
    let ([batch, heads, seq, head_dim], CachePosition { slot, start }) = (new.dims(), position);
    for index in 0..batch {
        decode::write_cache(
            cache,
            new.clone().slice_dim(0, index..index + 1),
            slot + index,
            start,
        );
    }
    cache
        .clone()
        .slice([slot..slot + batch, 0..heads, 0..start + seq, 0..head_dim])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_else_holds_the_memory_between_two_writes() {
        let device = Device::flex();
        let mut cache = decode::cache([3, 2, 8, 4], FloatDType::F32, &device);
        for start in 0..3 {
            let seen = append(
                &mut cache,
                CachePosition { slot: 1, start },
                Tensor::ones([2, 2, 1, 4], &device),
            );
            assert_eq!(seen.dims(), [2, 2, start + 1, 4]);
            assert_eq!(
                seen.into_data().iter::<f32>().sum::<f32>(),
                (16 * (start + 1)) as f32
            );
            assert!(cache.can_mut(), "position {start}");
        }
        assert_eq!(
            cache
                .slice_dim(0, 0..1)
                .into_data()
                .iter::<f32>()
                .sum::<f32>(),
            0.0
        );
    }
}
