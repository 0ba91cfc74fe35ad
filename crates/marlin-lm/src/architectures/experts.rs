//! The shape of a mixture of experts, as an architecture declares it.

use marlin_format::checkpoint::stacked::StackRows;
use marlin_kernels::Epilogue;
use marlin_kernels::experts::Router;

use super::{ExpertsPart, LayerPart, LayerShape, SwiGluShape};

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
    /// True if the router and the experts have biases.
    pub(crate) bias: bool,
    /// What is computed from gates and ups.
    pub(crate) epilogue: Epilogue,
    /// How a file may hold the experts of a block in one tensor.
    pub(crate) stack: StackShape,
    /// The experts that all tokens have.
    pub(crate) shared: Option<SharedExpertShape>,
    /// The part of the file's experts that these are, of a rank of a split model.
    pub(crate) part: Option<ExpertsPart>,
}

/// How a file holds the experts of a block in tensors of three dimensions: gates and ups as
/// `{name}.gate_up_proj`, down as `{name}.down_proj`, and their biases as
/// `{name}.gate_up_proj_bias` and `{name}.down_proj_bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StackShape {
    /// True if gates and ups alternate; false if all gates come first.
    pub(crate) alternates: bool,
    /// True if float weights are [experts, K, N]; false if they are [experts, N, K].
    pub(crate) has_k_first: bool,
    /// True if the architecture's own files are stacked, so that float models are written so.
    pub(crate) is_own: bool,
}

impl StackShape {
    /// The names of the stacks of gates and ups, and of down.
    pub(crate) const NAMES: [&'static str; 2] = ["gate_up_proj", "down_proj"];
    /// The layout in the memory of transformers from version 5 on, whose files have the experts one
    /// by one.
    pub(crate) const TRANSFORMERS: Self = Self {
        alternates: false,
        has_k_first: false,
        is_own: false,
    };
}

/// The part of a stack that is a layer of an expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StackPart {
    /// The name of the stack.
    pub(crate) name: String,
    /// The numbers of experts, and of output features of an expert.
    pub(crate) dims: [usize; 2],
    pub(crate) rows: StackRows,
    pub(crate) shape: StackShape,
}

impl StackPart {
    /// Returns true if this is the last part of its stack.
    pub(crate) fn is_last(&self) -> bool {
        let [experts, n] = self.dims;
        let StackRows {
            expert,
            first,
            step,
            count,
        } = self.rows;
        expert + 1 == experts && first + (count - 1) * step + 1 == n
    }
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
            bias: self.bias,
            is_float: true,
            stack: None,
            part: None,
        }
    }

    /// Returns the gate of the shared expert of the block with the name `block`.
    pub(crate) fn shared_gate_of(&self, block: &str) -> Option<LayerShape> {
        self.shared.as_ref().map(|shared| LayerShape {
            name: format!("{block}.{}", shared.gate),
            dims: [self.hidden, 1],
            bias: false,
            is_float: true,
            stack: None,
            part: None,
        })
    }

    /// Returns the layers of each expert of the block with the name `block`.
    pub(crate) fn experts_of(&self, block: &str) -> impl Iterator<Item = ExpertLayers> {
        let (hidden, width) = (self.hidden, self.intermediate);
        let part = self.part.as_ref();
        // Stacks are described as the file has them.
        let whole = part.map_or(width, |part| part.intermediate);
        (0..self.router.experts).map(move |expert| {
            let layer = |name: &str, dims: [usize; 2], part: Option<LayerPart>, stack| LayerShape {
                name: format!("{block}.{}.{expert}.{name}", self.name),
                dims,
                bias: self.bias,
                is_float: false,
                stack: Some(stack),
                part,
            };
            let stack = |name: &str, n, first, step, count| StackPart {
                name: format!("{block}.{}.{name}", self.name),
                dims: [self.router.experts, n],
                rows: StackRows {
                    expert,
                    first,
                    step,
                    count,
                },
                shape: self.stack,
            };
            let [gate, up, down] = self.layers;
            let [both, one] = StackShape::NAMES;
            let of_ups = match self.stack.alternates {
                true => [[0, 2], [1, 2]],
                false => [[0, 1], [whole, 1]],
            };
            let up_of = |name, [first, step]: [usize; 2]| {
                let stack = stack(both, 2 * whole, first, step, whole);
                let part = part.map(|part| part.of_up(hidden));
                layer(name, [hidden, width], part, stack)
            };
            let of_down = layer(
                down,
                [width, hidden],
                part.map(|part| part.of_down(hidden)),
                stack(one, hidden, 0, 1, hidden),
            );
            ExpertLayers {
                gate_up: [up_of(gate, of_ups[0]), up_of(up, of_ups[1])],
                down: LayerShape {
                    bias: self.has_down_biases(),
                    ..of_down
                },
            }
        })
    }

    /// Returns true if the down projections have biases that are added here.
    pub(crate) fn has_down_biases(&self) -> bool {
        self.bias && self.part.as_ref().is_none_or(|part| part.has_down_biases)
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
