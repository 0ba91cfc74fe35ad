//! The parts of a block that are quantised one after the other.

use burn::nn::Linear;
use burn::tensor::Tensor;

use crate::model::{Layer, Projection, ProjectionGroup};

/// The projections of a block that have the same inputs, in the order in which they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Attention's inputs.
    Qkv,
    /// Attention's output.
    O,
    /// The MLP's inputs.
    GateUp,
    /// The MLP's output.
    Down,
}

impl Part {
    pub(super) const ALL: [Self; 4] = [Self::Qkv, Self::O, Self::GateUp, Self::Down];

    /// Their names; of an architecture those that its checkpoints have.
    pub(super) fn names(self) -> &'static [&'static str] {
        match self {
            Self::Qkv => &[
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.qkv_proj",
            ],
            Self::O => &["self_attn.o_proj"],
            Self::GateUp => &["mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"],
            Self::Down => &["mlp.down_proj"],
        }
    }

    /// True if the outputs are added to the hidden states.
    pub(super) fn is_residual(self) -> bool {
        matches!(self, Self::O | Self::Down)
    }

    /// The projections of a layer, as one.
    pub(super) fn of(self, layer: &Layer) -> Option<&Projection> {
        match self {
            Self::Qkv => layer.self_attn.qkv_proj.joined(),
            Self::O => Some(&layer.self_attn.o_proj),
            Self::GateUp => layer.mlp.gate_up_proj.joined(),
            Self::Down => Some(&layer.mlp.down_proj),
        }
    }

    /// The float projections of a layer, as one.
    pub(super) fn dense(self, layer: &Layer) -> Option<&Linear> {
        match self.of(layer) {
            Some(Projection::Dense(linear)) => Some(linear),
            _ => None,
        }
    }

    /// What the part of a layer whose outputs are added to the hidden states makes of its inputs.
    pub(super) fn forward(self, layer: &Layer, inputs: Tensor<3>) -> Tensor<3> {
        match self {
            Self::O => layer.self_attn.o_proj.forward(inputs),
            _ => layer.mlp.down_proj.forward(inputs),
        }
    }

    /// Takes from a float layer what neither this part nor one after it looks at: where its inputs
    /// came from. The quantised projections are in its place then.
    pub(super) fn release_origin(self, float: &mut Layer, layer: &Layer) {
        match self {
            Self::Qkv => {}
            Self::O => float.self_attn.qkv_proj = layer.self_attn.qkv_proj.clone(),
            Self::GateUp => float.self_attn.o_proj = layer.self_attn.o_proj.clone(),
            Self::Down => float.mlp.gate_up_proj = layer.mlp.gate_up_proj.clone(),
        }
    }

    /// Puts a projection in the place of those of a layer.
    pub(super) fn replace(self, layer: &mut Layer, projection: Projection) {
        let group = |group: &mut ProjectionGroup, projection| {
            *group = ProjectionGroup::new(vec![projection], group.outputs().to_vec())
        };
        match self {
            Self::Qkv => group(&mut layer.self_attn.qkv_proj, projection),
            Self::O => layer.self_attn.o_proj = projection,
            Self::GateUp => group(&mut layer.mlp.gate_up_proj, projection),
            Self::Down => layer.mlp.down_proj = projection,
        }
    }
}
