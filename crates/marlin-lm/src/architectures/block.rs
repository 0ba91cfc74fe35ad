//! The shape of a transformer block, as an architecture declares it.
//!
//! [`BlockShape::projections`] is the only list of a block's projections. It has their names in a
//! checkpoint, their shapes, their origin of inputs, and the layers that may be one matmul. The
//! loader, the saver, the plans and the quantisers use this list.

use std::ops::Range;

use marlin_kernels::Epilogue;

use super::{ExpertsShape, LayerPart, ProjectionPart, StackPart};

/// One transformer block: a norm, a mixer, a norm and a feed-forward network, each pair added to
/// the residual stream.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BlockShape {
    /// The name of the norm before the mixer.
    pub(crate) mixer_norm: &'static str,
    pub(crate) mixer: MixerShape,
    /// The name of the norm before the feed-forward network.
    pub(crate) feed_forward_norm: &'static str,
    pub(crate) feed_forward: FeedForwardShape,
}

/// The part of a block that mixes positions.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum MixerShape {
    Attention(AttentionShape),
}

/// The part of a block that works on each position by itself.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum FeedForwardShape {
    SwiGlu(SwiGluShape),
    Experts(ExpertsShape),
}

/// Causal attention with grouped key and value heads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AttentionShape {
    pub(crate) qkv: ProjectionShape,
    /// The names of the norms of each query head and each key head, `[head_dim]`.
    pub(crate) head_norms: Option<[&'static str; 2]>,
    /// The name of the tensor of each query head's score without a position, `[heads]`.
    pub(crate) sinks: Option<&'static str>,
    pub(crate) output: ProjectionShape,
    /// The number of positions that a query attends to, including its own; `None` for all positions
    /// before.
    pub(crate) window: Option<usize>,
}

/// A feed-forward network with SwiGLU: `down(silu(gate(x)) * up(x))`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SwiGluShape {
    pub(crate) gate_up: ProjectionShape,
    pub(crate) down: ProjectionShape,
}

/// The kind of a projection of a block, in the order in which the projections run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProjectionKind {
    /// Queries, keys and values.
    Qkv,
    /// The output of attention.
    Output,
    /// Gate and up of SwiGLU: of the expert that all tokens have, in a mixture.
    GateUp,
    /// The output of SwiGLU.
    Down,
}

/// A projection, which is one matmul if the formats of its layers allow it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ProjectionShape {
    pub(crate) kind: ProjectionKind,
    /// The name of the projection as one matmul, relative to the block.
    pub(crate) name: &'static str,
    /// The names of the layers in a checkpoint, relative to the block, in the order of their output
    /// features: one for each output, or one for all outputs.
    pub(crate) layers: &'static [&'static str],
    /// The names of the layers in some files, one for each output, if the architecture has one
    /// layer for all outputs.
    pub(crate) split_layers: Option<&'static [&'static str]>,
    /// The number of input features, K.
    pub(crate) k: usize,
    /// The number of features of each output; the sum is N.
    pub(crate) outputs: Vec<usize>,
    /// True if the layers have biases.
    pub(crate) bias: bool,
    pub(crate) input: Input,
    /// The operation on the outputs that the same kernel computes, if the projection is one matmul.
    pub(crate) epilogue: Epilogue,
    /// The part of the file's projection that this is, of a rank of a split model.
    pub(crate) part: Option<ProjectionPart>,
}

/// The origin of the input features of a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    /// The residual stream after the norm before the mixer.
    MixerNorm,
    /// The residual stream after the norm before the feed-forward network.
    FeedForwardNorm,
    /// Values of heads, the last output of [`ProjectionKind::Qkv`], mixed over positions.
    Attention {
        head_dim: usize,
        /// The number of query heads that share a value head.
        shared: usize,
    },
    /// The last output of [`ProjectionKind::GateUp`], multiplied by its activated gates.
    Gated,
}

/// A linear layer of a checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct LayerShape {
    /// The name of the layer, without `.weight`.
    pub(crate) name: String,
    /// The numbers of input and output features, [K, N].
    pub(crate) dims: [usize; 2],
    /// True if the layer has a bias.
    pub(crate) bias: bool,
    /// True for a router, a gate and an embedding that is the output head, which files of quantised
    /// models hold in floats, whatever their configs say.
    pub(crate) is_float: bool,
    /// The part of a stack that is this layer, in files that stack the experts of a block.
    pub(crate) stack: Option<StackPart>,
    /// The part of the file's layer that this is, of a rank of a split model; `None` for the whole
    /// layer.
    pub(crate) part: Option<LayerPart>,
}

impl LayerShape {
    /// Returns the layer as the file has it.
    pub(crate) fn whole(&self) -> Self {
        Self {
            dims: self.part.as_ref().map_or(self.dims, |part| part.dims),
            part: None,
            ..self.clone()
        }
    }
}

impl BlockShape {
    /// Returns every projection, in the order in which the projections run. The layers of experts
    /// are not among them.
    pub(crate) fn projections(&self) -> impl Iterator<Item = &ProjectionShape> {
        let MixerShape::Attention(attention) = &self.mixer;
        let mlp = self.mlp().into_iter();
        [&attention.qkv, &attention.output]
            .into_iter()
            .chain(mlp.flat_map(|mlp| [&mlp.gate_up, &mlp.down]))
    }

    /// Returns the SwiGLU that all tokens have; `None` for a mixture without such an expert.
    pub(crate) fn mlp(&self) -> Option<&SwiGluShape> {
        match &self.feed_forward {
            FeedForwardShape::SwiGlu(mlp) => Some(mlp),
            FeedForwardShape::Experts(experts) => experts.shared.as_ref().map(|shared| &shared.mlp),
        }
    }

    /// Returns the experts of a mixture.
    pub(crate) fn experts(&self) -> Option<&ExpertsShape> {
        match &self.feed_forward {
            FeedForwardShape::SwiGlu(_) => None,
            FeedForwardShape::Experts(experts) => Some(experts),
        }
    }

    /// Returns the layers of the block with the name `block`, in the order in which a model is
    /// built; the layers of each item are read together. `contains` returns true for the names that
    /// the checkpoint has.
    pub(crate) fn layers(
        &self,
        block: &str,
        contains: &impl Fn(&str) -> bool,
    ) -> Vec<Vec<LayerShape>> {
        let of = |projection: &ProjectionShape| projection.layers_of(block, contains);
        let MixerShape::Attention(attention) = &self.mixer;
        let mut layers = vec![of(&attention.qkv), of(&attention.output)];
        if let Some(experts) = self.experts() {
            layers.push(vec![experts.router_of(block)]);
            layers.extend(
                experts
                    .experts_of(block)
                    .flat_map(|expert| [expert.gate_up.to_vec(), vec![expert.down]]),
            );
            layers.extend(experts.shared_gate_of(block).map(|gate| vec![gate]));
        }
        if let Some(mlp) = self.mlp() {
            layers.extend([of(&mlp.gate_up), of(&mlp.down)]);
        }
        layers
    }

    /// The name of the norm whose output a projection takes; `None` if its input is no norm's.
    pub(crate) fn norm(&self, input: Input) -> Option<&'static str> {
        match input {
            Input::MixerNorm => Some(self.mixer_norm),
            Input::FeedForwardNorm => Some(self.feed_forward_norm),
            Input::Attention { .. } | Input::Gated => None,
        }
    }

    /// The projection of a kind, if the block has it.
    pub(crate) fn projection(&self, kind: ProjectionKind) -> Option<&ProjectionShape> {
        self.projections()
            .find(|projection| projection.kind == kind)
    }
}

impl ProjectionKind {
    pub(crate) const ALL: [Self; 4] = [Self::Qkv, Self::Output, Self::GateUp, Self::Down];

    /// Returns true if the outputs are added to the residual stream.
    pub(crate) fn is_residual(self) -> bool {
        matches!(self, Self::Output | Self::Down)
    }
}

impl ProjectionShape {
    /// Returns the number of output features, N.
    pub(crate) fn n(&self) -> usize {
        self.outputs.iter().sum()
    }

    /// Returns every name that a checkpoint may have for a layer of the projection.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        let split = self.split_layers.unwrap_or_default();
        self.layers.iter().chain(split).copied()
    }

    /// Returns the names of the layers if `count` matmuls compute the outputs.
    pub(crate) fn names_of(&self, count: usize) -> &'static [&'static str] {
        match self.split_layers {
            Some(split) if count > self.layers.len() => split,
            _ => self.layers,
        }
    }

    /// Returns these names of layers, each with the range of its output features.
    pub(crate) fn columns(
        &self,
        names: &'static [&'static str],
    ) -> impl Iterator<Item = (&'static str, Range<usize>)> {
        let mut end = 0;
        names.iter().zip(&self.outputs).map(move |(name, &output)| {
            let start = end;
            end = if names.len() == 1 {
                self.n()
            } else {
                start + output
            };
            (*name, start..end)
        })
    }

    /// Returns the layers of a checkpoint for the projection of a block. `contains` returns true
    /// for the names that the checkpoint has.
    pub(crate) fn layers_of(
        &self,
        block: &str,
        contains: impl Fn(&str) -> bool,
    ) -> Vec<LayerShape> {
        let is_split = |names: &&'static [&'static str]| {
            names
                .iter()
                .any(|name| contains(&format!("{block}.{name}")))
        };
        let names = self.split_layers.filter(is_split).unwrap_or(self.layers);
        self.columns(names)
            .enumerate()
            .map(|(index, (name, columns))| LayerShape {
                name: format!("{block}.{name}"),
                dims: [self.k, columns.len()],
                bias: self.bias,
                is_float: false,
                stack: None,
                part: self.part.as_ref().map(|part| match names.len() {
                    1 => part.of_all(),
                    _ => part.of_output(index),
                }),
            })
            .collect()
    }
}

impl Input {
    /// Returns the projection whose last output the input features come from; `None` after a norm.
    pub(crate) fn projection(self) -> Option<ProjectionKind> {
        match self {
            Self::MixerNorm | Self::FeedForwardNorm => None,
            Self::Attention { .. } => Some(ProjectionKind::Qkv),
            Self::Gated => Some(ProjectionKind::GateUp),
        }
    }

    /// Returns the channel of the origin that input feature `feature` comes from. Query heads that
    /// share a value head share its channels.
    pub(crate) fn channel(self, feature: usize) -> usize {
        match self {
            Self::MixerNorm | Self::FeedForwardNorm | Self::Gated => feature,
            Self::Attention { head_dim, shared } => {
                feature / head_dim / shared * head_dim + feature % head_dim
            }
        }
    }
}
