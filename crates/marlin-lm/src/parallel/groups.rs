//! The groups of the layers whose rows of K are split over ranks.

use std::cmp::Reverse;
use std::ops::Range;

use marlin_format::GroupSize;

use super::ParallelError;
use super::split::{common_multiple, free_unit, ranges};
use crate::architectures::{FeedForwardShape, LayerShape, MixerShape};
use crate::config::ModelConfig;

/// A kind of feed-forward networks. Those of a kind are split alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    /// Those of layers without experts.
    Dense,
    /// Each expert.
    Expert,
    /// The expert that all tokens have.
    Shared,
}

/// A layer whose rows of K are split, and the number of rows of K that share scales.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RowSplit {
    layer: String,
    rows: usize,
}

/// The groups of the layers whose rows of K are split. Layers in floats, and those with one group
/// for all rows, have none and can be split anywhere.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RowGroups {
    /// The output projections of attention.
    outputs: Vec<RowSplit>,
    /// The down projections, by the kind of the network.
    downs: Vec<(Width, RowSplit)>,
}

impl RowGroups {
    /// Returns the groups of a model. `contains` returns true for the names of layers that its
    /// files have, and `group_of` returns the groups of a layer; `None` for floats.
    ///
    /// # Errors
    /// The first error of `group_of`.
    pub(crate) fn of<E>(
        config: &ModelConfig,
        contains: impl Fn(&str) -> bool,
        group_of: impl Fn(&LayerShape) -> Result<Option<GroupSize>, E>,
    ) -> Result<Self, E> {
        let split = |layer: &LayerShape| {
            let group = group_of(layer)?.filter(|&group| group != GroupSize::Channel);
            Ok::<_, E>(group.map(|group| RowSplit {
                layer: layer.name.clone(),
                rows: group.rows(layer.dims[0]),
            }))
        };
        let mut groups = Self::default();
        for index in 0..config.num_hidden_layers {
            let (shape, block) = (config.block(index), format!("model.layers.{index}"));
            let MixerShape::Attention(attention) = &shape.mixer;
            for layer in attention.output.layers_of(&block, &contains) {
                groups.outputs.extend(split(&layer)?);
            }
            let width = match &shape.feed_forward {
                FeedForwardShape::SwiGlu(_) => Width::Dense,
                FeedForwardShape::Experts(_) => Width::Shared,
            };
            if let Some(mlp) = shape.mlp() {
                for layer in mlp.down.layers_of(&block, &contains) {
                    groups
                        .downs
                        .extend(split(&layer)?.map(|split| (width, split)));
                }
            }
            // The experts of a block have one format.
            let first = shape
                .experts()
                .and_then(|experts| experts.experts_of(&block).next());
            if let Some(expert) = first {
                let split = split(&expert.down)?;
                groups
                    .downs
                    .extend(split.map(|split| (Width::Expert, split)));
            }
        }
        Ok(groups)
    }

    /// Returns the features of each rank, of `total` features of the networks of a kind; empty
    /// ranges if there are no such networks.
    ///
    /// # Errors
    /// [`ParallelError::Groups`] if there are fewer groups than ranks.
    pub(crate) fn split(
        &self,
        width: Width,
        total: usize,
        count: usize,
    ) -> Result<Vec<Range<usize>>, ParallelError> {
        if total == 0 {
            return Ok(vec![0..0; count]);
        }
        let of_kind = self.downs.iter().filter(|(kind, _)| *kind == width);
        let of_kind = of_kind.map(|(_, split)| split);
        let bound = of_kind
            .clone()
            .fold(1, |unit, split| common_multiple(unit, split.rows));
        let unit = match bound {
            1 => free_unit(total, count),
            bound => bound,
        };
        ranges(total, count, unit).ok_or_else(|| ParallelError::Groups {
            layer: of_kind.min_by_key(|split| Reverse(split.rows)).map_or_else(
                || "the feed-forward networks".into(),
                |split| split.layer.clone(),
            ),
            groups: total.div_ceil(unit),
            rows: unit,
            count,
        })
    }

    /// Checks that row `row` of the output projections, where a rank begins, begins a group.
    ///
    /// # Errors
    /// [`ParallelError::Border`] with the first layer of which it does not.
    pub(crate) fn check_output(
        &self,
        row: usize,
        rank: usize,
        count: usize,
    ) -> Result<(), ParallelError> {
        let within = |split: &&RowSplit| !row.is_multiple_of(split.rows);
        match self.outputs.iter().find(within) {
            None => Ok(()),
            Some(split) => Err(ParallelError::Border {
                layer: split.layer.clone(),
                rank,
                count,
                row,
                group: split.rows,
            }),
        }
    }
}
