//! The experts of a block that is being quantised.

use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use marlin_kernels::experts::host;
use marlin_nn as decode;
use marlin_quant::{FloatActivations, LayerError, LayerInputs};

use super::hidden::unread;
use super::walk::{CalibrationWalk, rows};
use crate::ModelError;
use crate::architectures::ExpertsShape;
use crate::model::{Block, DenseExperts, Experts, Mixture};

/// A matmul of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpertMatmul {
    pub(super) expert: usize,
    /// True for down, false for gate and up side by side.
    pub(super) is_down: bool,
}

impl ExpertMatmul {
    /// Returns the matmuls of all experts, in the order in which they are quantised.
    pub(super) fn all(shape: &ExpertsShape) -> impl Iterator<Item = Self> {
        (0..shape.router.experts)
            .flat_map(|expert| [false, true].map(|is_down| Self { expert, is_down }))
    }

    /// Returns the names of the layers in a checkpoint, of the block with the name `block`.
    pub(super) fn layers(self, shape: &ExpertsShape, block: &str) -> Vec<String> {
        let [gate, up, down] = shape.layers;
        let layers = if self.is_down {
            vec![down]
        } else {
            vec![gate, up]
        };
        let name = |layer| format!("{block}.{}.{}.{layer}", shape.name, self.expert);
        layers.into_iter().map(name).collect()
    }

    /// Returns the float weight [K, N] of the matmul in a block.
    pub(super) fn weight(self, block: &Block) -> Option<Tensor<2>> {
        let experts = dense(block)?;
        let all = match self.is_down {
            true => &experts.down,
            false => &experts.gate_up,
        };
        let of_expert = all.val().slice_dim(0, self.expert..self.expert + 1);
        Some(of_expert.squeeze_dim(0))
    }

    /// Replaces the weight of the matmul in a block.
    pub(super) fn replace(self, block: &mut Block, weight: Tensor<2>) {
        let Some(experts) = dense_mut(block) else {
            return;
        };
        let all = match self.is_down {
            true => &mut experts.down,
            false => &mut experts.gate_up,
        };
        let [k, n] = weight.dims();
        let ranges = [self.expert..self.expert + 1, 0..k, 0..n];
        // Without the parameter's own share, the tensor is changed in place.
        let placeholder = Tensor::empty([1, 1, 1], &weight.device());
        let tensor = std::mem::replace(all, crate::model::loaded(placeholder)).into_value();
        *all = crate::model::loaded(tensor.slice_assign(ranges, weight.unsqueeze()));
    }

    /// Returns the inputs [rows, K] of the matmul in a block, for rows `x` [rows, hidden] after the
    /// norm.
    fn inputs(self, block: &Block, x: Tensor<2>) -> Tensor<2> {
        let gate_up = Self {
            is_down: false,
            ..self
        };
        let of_block = dense(block).filter(|_| self.is_down);
        match of_block.zip(gate_up.weight(block)) {
            Some((experts, weight)) => {
                let bias = experts.gate_up_bias.as_ref().map(|biases| {
                    let of_expert = biases.val().slice_dim(0, self.expert..self.expert + 1);
                    of_expert.squeeze_dim(0)
                });
                decode::apply(experts.epilogue, decode::linear(x, weight, bias))
            }
            None => x,
        }
    }
}

/// Returns the float experts of a block.
fn dense(block: &Block) -> Option<&DenseExperts> {
    match &block.mixture()?.experts {
        Experts::Dense(experts) => Some(experts),
        Experts::Quant(_) => None,
    }
}

/// Returns the float experts of a block, mutably.
fn dense_mut(block: &mut Block) -> Option<&mut DenseExperts> {
    match &mut block.mixture_mut()?.experts {
        Experts::Dense(experts) => Some(experts),
        Experts::Quant(_) => None,
    }
}

/// The experts of each token of each batch, read once a block: [tokens, top_k].
pub(super) type Chosen = Vec<Vec<u32>>;

impl CalibrationWalk<'_> {
    /// Returns the experts that the router of a block chooses for the tokens of each batch, whose
    /// hidden states have passed the attention of the quantised block.
    pub(super) fn chosen(&mut self, at: &str, block: &Block) -> Result<Chosen, ModelError> {
        let mut chosen = Chosen::new();
        let Some(mixture) = block.mixture() else {
            return Ok(chosen);
        };
        self.for_each_batch(at, |_, _, hidden| {
            let x = rows(block.feed_forward_norm.forward(hidden));
            chosen.push(experts_of(at, mixture, x)?);
            Ok(())
        })?;
        Ok(chosen)
    }

    /// Visits the inputs of an expert's matmul, batch after batch: those of the tokens that chose
    /// the expert, or of all tokens. A batch without such tokens is left out.
    pub(super) fn visit_expert(
        &mut self,
        at: &str,
        matmul: ExpertMatmul,
        [block, float]: [&Block; 2],
        chosen: &Chosen,
        visit: &mut dyn FnMut(LayerInputs) -> Result<(), LayerError>,
    ) -> Result<(), ModelError> {
        self.for_each_batch(at, |walk, index, hidden| {
            let tokens = walk.tokens_of(index, matmul.expert, chosen, block);
            if tokens.is_empty() {
                return Ok(());
            }
            let float_hidden = walk.float(index).map_err(|error| unread(at, &error))?;
            let count = tokens.len();
            let tokens =
                Tensor::<1, Int>::from_data(TensorData::new(tokens, [count]), &hidden.device());
            let inputs = |block: &Block, hidden: Tensor<3>| {
                let x = rows(hidden).select(0, tokens.clone());
                matmul.inputs(block, block.feed_forward_norm.forward(x))
            };
            Ok(visit(LayerInputs {
                quantized: inputs(block, hidden),
                float: float_hidden.map(|hidden| FloatActivations::Inputs(inputs(float, hidden))),
            })?)
        })
    }

    /// Returns the tokens of a batch that an expert is calibrated with.
    fn tokens_of(&self, batch: usize, expert: usize, chosen: &Chosen, block: &Block) -> Vec<i32> {
        let top_k = block
            .mixture()
            .map_or(1, |mixture| mixture.experts.router().top_k);
        let tokens = chosen[batch].chunks(top_k).enumerate();
        tokens
            .filter(|(_, experts)| self.route_all || experts.contains(&(expert as u32)))
            .map(|(token, _)| token as i32)
            .collect()
    }
}

/// Reads the experts of tokens to the host, for rows [tokens, hidden] after the norm.
fn experts_of(at: &str, mixture: &Mixture, x: Tensor<2>) -> Result<Vec<u32>, ModelError> {
    let failed = |reason: String| ModelError::HiddenStates {
        block: at.into(),
        reason,
    };
    let logits = mixture.router.forward(x).cast(FloatDType::F32);
    let logits = logits
        .try_into_vec_as::<f32>()
        .map_err(|error| failed(error.to_string()))?;
    let routing = host::route(&mixture.experts.router(), &logits, None, 1.0);
    Ok(routing.map_err(|error| failed(error.to_string()))?.experts)
}
