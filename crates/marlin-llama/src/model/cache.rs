use burn::tensor::{Device, FloatDType, Tensor};
use marlin_decode as decode;

use crate::config::LlamaConfig;

/// Keys and values of the positions that a model has seen, allocated once for `max_len` positions of each of several sequences.
///
/// New positions are written in place: nothing else holds a layer's tensors between two forward passes.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    len: usize,
    max_len: usize,
}

/// One layer of a [`KvCache`]: [slots, kv_heads, max_len, head_dim] each.
#[derive(Debug)]
pub(crate) struct LayerCache {
    pub(crate) keys: Tensor<4>,
    pub(crate) values: Tensor<4>,
}

/// Where new positions go in a layer's cache: to the slots from `slot` on, at `start`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) slot: usize,
    pub(crate) start: usize,
}

impl KvCache {
    /// An empty cache.
    ///
    /// `dtype` is that of the activations, `max_len` the number of positions of each of `slots` sequences.
    pub fn new(config: &LlamaConfig, slots: usize, max_len: usize, dtype: FloatDType, device: &Device) -> Self {
        let shape = [slots, config.num_key_value_heads, max_len, config.head_dim];
        let zeros = || decode::cache(shape, dtype, device);
        let layers = (0..config.num_hidden_layers).map(|_| LayerCache { keys: zeros(), values: zeros() }).collect();
        Self { layers, len: 0, max_len }
    }

    /// Bytes of such a cache.
    pub fn size_bytes(config: &LlamaConfig, slots: usize, max_len: usize, dtype: FloatDType) -> usize {
        let elements = [slots, config.num_key_value_heads, max_len, config.head_dim].into_iter().fold(1, usize::saturating_mul);
        let size = burn::tensor::DType::from(dtype).size();
        elements.saturating_mul(2 * size * config.num_hidden_layers)
    }

    /// Positions that all of its sequences hold, where they go together: [`LlamaModel::forward`](super::LlamaModel::forward) counts them.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no position.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions there is room for.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Forgets every position; the memory stays.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    pub(crate) fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[index]
    }

    pub(crate) fn advance(&mut self, positions: usize) {
        self.len += positions;
    }
}

impl LayerCache {
    /// Writes keys and values [batch, kv_heads, seq, head_dim] at a place, and returns those of all positions of these slots so far.
    pub(crate) fn append(&mut self, place: Place, keys: Tensor<4>, values: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        (append(&mut self.keys, place, keys), append(&mut self.values, place, values))
    }
}

fn append(cache: &mut Tensor<4>, place: Place, new: Tensor<4>) -> Tensor<4> {
    let [batch, heads, seq, head_dim] = new.dims();
    for index in 0..batch {
        decode::write_cache(cache, new.clone().slice_dim(0, index..index + 1), place.slot + index, place.start);
    }
    cache.clone().slice([place.slot..place.slot + batch, 0..heads, 0..place.start + seq, 0..head_dim])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_else_holds_the_memory_between_two_writes() {
        let device = Device::flex();
        let mut cache = decode::cache([3, 2, 8, 4], FloatDType::F32, &device);
        for start in 0..3 {
            let seen = append(&mut cache, Place { slot: 1, start }, Tensor::ones([2, 2, 1, 4], &device));
            assert_eq!(seen.dims(), [2, 2, start + 1, 4]);
            assert_eq!(seen.into_data().iter::<f32>().sum::<f32>(), (16 * (start + 1)) as f32);
            assert!(cache.can_mut(), "position {start}");
        }
        assert_eq!(cache.slice_dim(0, 0..1).into_data().iter::<f32>().sum::<f32>(), 0.0);
    }
}
