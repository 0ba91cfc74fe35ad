//! The shape of a mixture of experts, as an architecture declares it.

use marlin_kernels::experts::Router;

use super::{LayerShape, SwiGluShape};

/// A feed-forward network whose router chooses some of many experts for each token.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ExpertsShape {
    /// The name of the router's layer [hidden, experts], relative to the block.
    pub(crate) router_layer: &'static str,
    /// How experts are chosen and weighted.
    pub(crate) router: Router,
    /// The name that the numbers of experts follow, relative to the block.
    pub(crate) name: &'static str,
    /// The names of an expert's gate, up and down, relative to the expert.
    pub(crate) layers: [&'static str; 3],
    /// The number of features of the residual stream.
    pub(crate) hidden: usize,
    /// The number of features between gate and up, and down.
    pub(crate) intermediate: usize,
    /// The experts that all tokens have.
    pub(crate) shared: Option<SharedExpertShape>,
}

/// An expert that all tokens have, weighted by the sigmoid of its gate.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SharedExpertShape {
    pub(crate) mlp: SwiGluShape,
    /// The name of the gate's layer [hidden, 1], relative to the block.
    pub(crate) gate: &'static str,
}

/// The layers of an expert in a checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct ExpertLayers {
    /// Gate and up.
    pub(crate) gate_up: [LayerShape; 2],
    pub(crate) down: LayerShape,
}

impl ExpertsShape {
    /// Returns the router's layer of the block with the name `block`.
    pub(crate) fn router_of(&self, block: &str) -> LayerShape {
        LayerShape {
            name: format!("{block}.{}", self.router_layer),
            dims: [self.hidden, self.router.experts],
            bias: false,
            is_router: true,
        }
    }

    /// Returns the gate of the shared expert of the block with the name `block`.
    pub(crate) fn shared_gate_of(&self, block: &str) -> Option<LayerShape> {
        self.shared.as_ref().map(|shared| LayerShape {
            name: format!("{block}.{}", shared.gate),
            dims: [self.hidden, 1],
            bias: false,
            is_router: true,
        })
    }

    /// Returns the layers of each expert of the block with the name `block`.
    pub(crate) fn experts_of(&self, block: &str) -> impl Iterator<Item = ExpertLayers> {
        (0..self.router.experts).map(move |expert| {
            let layer = |name: &str, dims| LayerShape {
                name: format!("{block}.{}.{expert}.{name}", self.name),
                dims,
                bias: false,
                is_router: false,
            };
            let [gate, up, down] = self.layers;
            let widening = [self.hidden, self.intermediate];
            ExpertLayers {
                gate_up: [layer(gate, widening), layer(up, widening)],
                down: layer(down, [self.intermediate, self.hidden]),
            }
        })
    }

    /// Returns true if the layer with this name, relative to the block, is one of an expert.
    pub(crate) fn has_layer(&self, name: &str) -> bool {
        let of_expert = name
            .strip_prefix(self.name)
            .and_then(|rest| rest.strip_prefix('.')?.split_once('.'));
        of_expert.is_some_and(|(expert, layer)| {
            let number = expert.parse::<usize>();
            number.is_ok_and(|number| number < self.router.experts && number.to_string() == expert)
                && self.layers.contains(&layer)
        })
    }

    /// Returns the number of weights of all experts, without their router.
    pub(crate) fn expert_weights(&self) -> usize {
        let of_expert = 3usize.saturating_mul(self.hidden.saturating_mul(self.intermediate));
        of_expert.saturating_mul(self.router.experts)
    }
}
