//! The progress of a quantisation.

use std::collections::BTreeMap;

use super::plan::{Plan, Target};
use super::resume::block_of;

/// The progress of a quantisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizeProgress<'a> {
    /// The tensor of the source that was written or quantised, in full or in part.
    pub tensor: &'a str,
    /// The number of tensors and parts of tensors that are done.
    pub done: usize,
    /// The number of all tensors and parts of tensors.
    pub total: usize,
    /// The number of blocks whose layers are all quantised.
    pub blocks_done: usize,
    /// The number of blocks with layers to quantise.
    pub blocks: usize,
}

/// A count of the blocks whose layers are all quantised.
pub(super) struct BlockCount {
    /// The number of layers of each block that are not yet quantised.
    open: BTreeMap<usize, usize>,
    done: usize,
}

impl BlockCount {
    /// Creates the count of a run that begins.
    pub(super) fn new(plans: &[Plan<'_>]) -> Self {
        let quantized = plans.iter().filter_map(|plan| match &plan.target {
            Target::Quantize(layer) => Some(layer.as_str()),
            Target::Copy(_) => None,
        });
        Self::of_layers(quantized)
    }

    fn of_layers<'a>(layers: impl Iterator<Item = &'a str>) -> Self {
        let mut open = BTreeMap::new();
        for block in layers.filter_map(block_of) {
            *open.entry(block).or_default() += 1;
        }
        Self { open, done: 0 }
    }

    /// Counts a layer that is quantised.
    pub(super) fn add(&mut self, layer: &str) {
        let Some(open) = block_of(layer).and_then(|block| self.open.get_mut(&block)) else {
            return;
        };
        if *open == 1 {
            self.done += 1;
        }
        *open = open.saturating_sub(1);
    }

    /// Returns the number of blocks that are done.
    pub(super) fn done(&self) -> usize {
        self.done
    }

    /// Returns the number of all blocks that have layers to quantise.
    pub(super) fn blocks(&self) -> usize {
        self.open.len()
    }
}

#[cfg(test)]
mod tests {
    use super::BlockCount;

    #[test]
    fn a_block_is_done_with_its_last_layer_in_any_order() {
        let layers = ["model.layers.0.a", "model.layers.2.a", "model.layers.2.b"];
        let mut count = BlockCount::of_layers(layers.into_iter());
        assert_eq!((count.done(), count.blocks()), (0, 2));
        let steps = [
            ("model.layers.2.b", 0),
            ("lm_head", 0),
            ("model.layers.7.a", 0),
            ("model.layers.2.a", 1),
            ("model.layers.2.a", 1),
            ("model.layers.0.a", 2),
        ];
        for (layer, done) in steps {
            count.add(layer);
            assert_eq!(count.done(), done, "{layer}");
        }
    }
}
