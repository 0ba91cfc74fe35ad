use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::config::LlamaConfig;

/// Keys and values of the positions a model has seen, allocated once for `max_len` positions.
///
/// New positions are written in place: nothing else holds a layer's tensors between two forward passes.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    len: usize,
    max_len: usize,
}

/// One layer of a [`KvCache`]: [batch, kv_heads, max_len, head_dim] each.
#[derive(Debug)]
pub(crate) struct LayerCache {
    keys: Slot,
    values: Slot,
}

/// A tensor that can be taken out, changed and put back, so that it has one owner while it is changed.
#[derive(Debug)]
struct Slot(Option<Tensor<4>>);

impl KvCache {
    /// An empty cache.
    ///
    /// `dtype` is that of the activations, `max_len` the number of positions of each of `batch` sequences.
    pub fn new(config: &LlamaConfig, batch: usize, max_len: usize, dtype: FloatDType, device: &Device) -> Self {
        let shape = [batch, config.num_key_value_heads, max_len, config.head_dim];
        let slot = || Slot(Some(Tensor::zeros(shape, (device, DType::from(dtype)))));
        let layers = (0..config.num_hidden_layers).map(|_| LayerCache { keys: slot(), values: slot() }).collect();
        Self { layers, len: 0, max_len }
    }

    /// Positions it holds.
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
    /// Writes keys and values [batch, kv_heads, seq, head_dim] from position `start` on, and returns those of all positions so far.
    pub(crate) fn append(&mut self, start: usize, keys: Tensor<4>, values: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        (self.keys.append(start, keys), self.values.append(start, values))
    }
}

impl Slot {
    fn append(&mut self, start: usize, new: Tensor<4>) -> Tensor<4> {
        let [batch, heads, seq, head_dim] = new.dims();
        let end = start + seq;
        let all = match self.0.take() {
            Some(all) => all.slice_assign([0..batch, 0..heads, start..end, 0..head_dim], new),
            // Empty only after a panic in the line above, which left the cache without this layer.
            None => new,
        };
        let seen = all.clone().slice([0..batch, 0..heads, 0..end, 0..head_dim]);
        self.0 = Some(all);
        seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_else_holds_the_memory_between_two_writes() {
        let device = Device::flex();
        let mut slot = Slot(Some(Tensor::zeros([1, 2, 8, 4], &device)));
        for start in 0..3 {
            let seen = slot.append(start, Tensor::ones([1, 2, 1, 4], &device));
            assert_eq!(seen.dims(), [1, 2, start + 1, 4]);
            drop(seen);
            assert!(slot.0.as_ref().is_some_and(Tensor::can_mut), "position {start}");
        }
    }
}
