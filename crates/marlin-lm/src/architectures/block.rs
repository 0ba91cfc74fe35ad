//! The shape of a transformer block, as an architecture declares it.
//!
//! [`BlockShape::projections`] is the one list of a block's projections: their names in a
//! checkpoint, their shapes, which of them are one matmul and which share an input. The loader, the
//! saver, plans and quantisers go through it.

use std::ops::Range;

use marlin_kernels::Epilogue;

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
}

/// Causal attention with grouped key and value heads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AttentionShape {
    pub(crate) qkv: ProjectionShape,
    /// The names of the norms of each query head and each key head, `[head_dim]`.
    pub(crate) head_norms: Option<[&'static str; 2]>,
    pub(crate) output: ProjectionShape,
    /// Positions that a query sees, its own included; `None`: all before it.
    pub(crate) window: Option<usize>,
}

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SwiGluShape {
    pub(crate) gate_up: ProjectionShape,
    pub(crate) down: ProjectionShape,
}

/// A projection of a block by its place, in the order in which they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProjectionKind {
    /// Queries, keys and values.
    Qkv,
    /// The output of attention.
    Output,
    /// Gate and up of SwiGLU.
    GateUp,
    /// The output of the feed-forward network.
    Down,
}

/// A projection: one matmul, where the formats of its layers allow it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ProjectionShape {
    pub(crate) kind: ProjectionKind,
    /// Its name as one matmul, below the block.
    pub(crate) name: &'static str,
    /// The names of its layers in a checkpoint, below the block, in the order of their output
    /// features: one for each output, or one for all of them.
    pub(crate) layers: &'static [&'static str],
    /// The names of layers that some files have, one for each output, where the architecture has
    /// one for all of them.
    pub(crate) split_layers: Option<&'static [&'static str]>,
    /// Input features, K.
    pub(crate) k: usize,
    /// Features of each output; their sum is N.
    pub(crate) outputs: Vec<usize>,
    /// True if its layers have biases.
    pub(crate) bias: bool,
    pub(crate) input: Input,
    /// What is computed of its outputs in the same kernel, where it is one matmul.
    pub(crate) epilogue: Epilogue,
}

/// What the input features of a projection come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    /// The residual stream after the norm before the mixer.
    MixerNorm,
    /// The residual stream after the norm before the feed-forward network.
    FeedForwardNorm,
    /// Values of heads, the last output of [`ProjectionKind::Qkv`], mixed over positions.
    Attention {
        head_dim: usize,
        /// Query heads that share a value head.
        shared: usize,
    },
    /// The last output of [`ProjectionKind::GateUp`], multiplied by its activated gates.
    Gated,
}

/// A linear layer as a checkpoint holds it.
#[derive(Debug, Clone)]
pub(crate) struct LayerShape {
    /// Its name, without `.weight`.
    pub(crate) name: String,
    /// [K, N].
    pub(crate) dims: [usize; 2],
    /// True for a layer with a bias.
    pub(crate) bias: bool,
}

impl BlockShape {
    /// Every projection, in the order in which they run.
    pub(crate) fn projections(&self) -> [&ProjectionShape; 4] {
        let MixerShape::Attention(attention) = &self.mixer;
        let FeedForwardShape::SwiGlu(mlp) = &self.feed_forward;
        [&attention.qkv, &attention.output, &mlp.gate_up, &mlp.down]
    }

    /// The name of the norm whose output a projection takes; `None` if its input is no norm's.
    pub(crate) fn norm(&self, input: Input) -> Option<&'static str> {
        match input {
            Input::MixerNorm => Some(self.mixer_norm),
            Input::FeedForwardNorm => Some(self.feed_forward_norm),
            Input::Attention { .. } | Input::Gated => None,
        }
    }

    /// The projection of a kind.
    pub(crate) fn projection(&self, kind: ProjectionKind) -> &ProjectionShape {
        self.projections()[kind as usize]
    }
}

impl ProjectionKind {
    pub(crate) const ALL: [Self; 4] = [Self::Qkv, Self::Output, Self::GateUp, Self::Down];

    /// True if the outputs are added to the residual stream.
    pub(crate) fn is_residual(self) -> bool {
        matches!(self, Self::Output | Self::Down)
    }
}

impl ProjectionShape {
    /// Output features, N.
    pub(crate) fn n(&self) -> usize {
        self.outputs.iter().sum()
    }

    /// Every name that a checkpoint may have for one of its layers.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        let split = self.split_layers.unwrap_or_default();
        self.layers.iter().chain(split).copied()
    }

    /// The names of its layers where `count` matmuls have its outputs.
    pub(crate) fn names_of(&self, count: usize) -> &'static [&'static str] {
        match self.split_layers {
            Some(split) if count > self.layers.len() => split,
            _ => self.layers,
        }
    }

    /// Layers of these names, and which of the output features are theirs.
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

    /// The layers of a checkpoint for the projection of a block: `contains` says which names it
    /// has.
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
            .map(|(name, columns)| LayerShape {
                name: format!("{block}.{name}"),
                dims: [self.k, columns.len()],
                bias: self.bias,
            })
            .collect()
    }
}

impl Input {
    /// The projection whose last outputs the input features come from; none after a norm.
    pub(crate) fn projection(self) -> Option<ProjectionKind> {
        match self {
            Self::MixerNorm | Self::FeedForwardNorm => None,
            Self::Attention { .. } => Some(ProjectionKind::Qkv),
            Self::Gated => Some(ProjectionKind::GateUp),
        }
    }

    /// The channel of its origin that input feature `feature` comes from: query heads that share a
    /// value head share its channels.
    pub(crate) fn channel(self, feature: usize) -> usize {
        match self {
            Self::MixerNorm | Self::FeedForwardNorm | Self::Gated => feature,
            Self::Attention { head_dim, shared } => {
                feature / head_dim / shared * head_dim + feature % head_dim
            }
        }
    }
}
