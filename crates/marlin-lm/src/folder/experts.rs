//! The experts of a block from the files of a folder, one by one or in stacks.

use std::ops::Range;

use burn::tensor::{DType, Tensor};
use marlin_format::PlainWeight;
use marlin_format::checkpoint::stacked::StackRows;

use super::reader::HostWeights;
use super::upload::{contiguous, sync};
use super::weights::FileWeights;
use crate::ModelError;
use crate::architectures::{ExpertLayers, ExpertsShape, LayerShape, StackPart};

/// The weights of the experts of a layer, as they are read one after the other.
pub(super) enum HostExperts {
    /// Quantised weights.
    Quantized(Vec<PlainWeight>),
    /// The layers of each expert, side by side, whose float weights have not been read.
    Float(Vec<Vec<LayerShape>>),
}

impl Default for HostExperts {
    fn default() -> Self {
        Self::Quantized(Vec::new())
    }
}

impl HostExperts {
    /// Adds the weights of an expert's `layers`, which have one matmul.
    pub(super) fn push(
        &mut self,
        expert: usize,
        layers: &[LayerShape],
        weights: HostWeights,
    ) -> Result<(), ModelError> {
        let name = || layers.first().map_or("", |layer| &layer.name).to_string();
        let weight = match weights {
            HostWeights::Joined(weight) => Some(weight),
            HostWeights::Separate(mut weights) if weights.len() == 1 => weights.remove(0),
            HostWeights::Separate(weights) if weights.iter().all(Option::is_none) => None,
            HostWeights::Separate(_) => return Err(ModelError::NotJoined { layer: name() }),
        };
        match (&mut *self, weight) {
            (Self::Quantized(all), Some(weight)) => {
                let [expected, found] = [all.first().unwrap_or(&weight), &weight]
                    .map(|weight| weight.descriptor().with_permutation(false));
                if expected != found {
                    return Err(ModelError::OtherExpert {
                        layer: name(),
                        expected: expected.to_string(),
                        found: found.to_string(),
                    });
                }
                all.push(weight);
            }
            (Self::Float(all), None) => all.push(layers.to_vec()),
            (Self::Quantized(_), None) if expert == 0 => *self = Self::Float(vec![layers.to_vec()]),
            _ => return Err(ModelError::MixedExperts { layer: name() }),
        }
        Ok(())
    }
}

impl FileWeights<'_> {
    /// Uploads the biases of experts [experts, N]: of gates and ups side by side, and of down.
    pub(super) fn expert_biases(
        &mut self,
        block: &str,
        shape: &ExpertsShape,
    ) -> Result<[Tensor<2>; 2], ModelError> {
        let layers: Vec<ExpertLayers> = shape.experts_of(block).collect();
        let gate_up = layers.iter().map(|layers| &layers.gate_up[..]);
        let gate_up = self.biases_of(gate_up)?;
        if !shape.has_down_biases() {
            // Another rank adds them.
            let zeros = [shape.router.experts, shape.hidden];
            let target = (self.device, DType::from(self.dtype));
            return Ok([gate_up, contiguous(Tensor::zeros(zeros, target))]);
        }
        let down = layers
            .iter()
            .map(|layers| std::slice::from_ref(&layers.down));
        Ok([gate_up, self.biases_of(down)?])
    }

    /// Uploads the biases of experts [experts, N], from a stack or layer by layer.
    fn biases_of<'l>(
        &mut self,
        mut experts: impl Iterator<Item = &'l [LayerShape]> + Clone,
    ) -> Result<Tensor<2>, ModelError> {
        let first = experts.clone().next().unwrap_or_default();
        if let Some(part) = first.first().and_then(|layer| self.reader.stack_of(layer)) {
            let name = format!("{}_bias", part.name);
            let biases = match stack_columns(first) {
                None => self.tensor(name, part.dims)?,
                Some(columns) => {
                    let experts = 0..part.dims[0];
                    self.tensor_part(name, part.dims, [&[experts], &columns])?
                }
            };
            return Ok(match part.rows.step {
                1 => biases,
                step => contiguous(side_by_side(biases.unsqueeze_dim(1), step).squeeze_dim(1)),
            });
        }
        let of_expert = experts.try_fold(Vec::new(), |mut all, layers| {
            all.extend(self.joined_bias(layers)?);
            Ok::<_, ModelError>(all)
        });
        Ok(contiguous(Tensor::stack(of_expert?, 0)))
    }

    /// Uploads the float weights [experts, K, N] of a stack, of the `layers` of an expert.
    fn float_stack(
        &mut self,
        part: &StackPart,
        layers: &[LayerShape],
    ) -> Result<Tensor<3>, ModelError> {
        let [experts, n] = part.dims;
        let first = layers.first();
        let of_rank = first.and_then(|layer| layer.part.as_ref());
        let k = of_rank.map_or_else(|| first.map_or(0, |layer| layer.dims[0]), |of| of.dims[0]);
        let rows = of_rank.map_or(0..k, |of| of.rows.clone());
        let (all_experts, all_columns) = (0..experts, 0..n);
        let columns = stack_columns(layers).unwrap_or_else(|| vec![all_columns]);
        let (all, rows) = ([all_experts], [rows]);
        let weights = if part.shape.has_k_first {
            self.tensor_part(part.name.clone(), [experts, k, n], [&all, &rows, &columns])?
        } else {
            self.tensor_part(part.name.clone(), [experts, n, k], [&all, &columns, &rows])?
                .swap_dims(1, 2)
        };
        sync(self.device, &part.name)?;
        Ok(match part.rows.step {
            1 => weights,
            step => side_by_side(weights, step),
        })
    }

    /// Uploads the float weights of experts, [experts, K, N], with the layers of each side by side.
    pub(super) fn float_experts(
        &mut self,
        experts: &[Vec<LayerShape>],
    ) -> Result<Tensor<3>, ModelError> {
        let first = experts.first().map_or(&[][..], Vec::as_slice);
        if let Some(layer) = first.first()
            && let Some(part) = self.reader.stack_of(layer)
        {
            return self.float_stack(part, first);
        }
        let mut all = Vec::new();
        for layers in experts {
            let weights: Vec<Tensor<2>> = layers
                .iter()
                .map(|layer| self.float(layer))
                .collect::<Result<_, _>>()?;
            all.push(Tensor::cat(weights, 0).transpose());
        }
        let stacked = Tensor::stack(all, 0);
        let name = experts.first().and_then(|layers| layers.first());
        sync(self.device, name.map_or("", |layer| &layer.name))?;
        Ok(stacked)
    }
}

/// Returns the columns of a stack that belong to the `layers` of an expert of a rank; `None` for
/// the whole stack.
fn stack_columns(layers: &[LayerShape]) -> Option<Vec<Range<usize>>> {
    let mut columns = Vec::new();
    for layer in layers {
        let (part, stack) = (layer.part.as_ref()?, layer.stack.as_ref()?);
        let StackRows { first, step, .. } = stack.rows;
        if step > 1 && first > 0 {
            // The layers alternate, and the columns of the first are beside those of the others.
            continue;
        }
        let of_layer = |range: &Range<usize>| first + range.start * step..first + range.end * step;
        columns.extend(part.columns.iter().map(of_layer));
    }
    Some(columns)
}

/// Returns [experts, K, N] with the columns of `step` layers side by side that alternate in
/// `alternating`.
fn side_by_side(alternating: Tensor<3>, step: usize) -> Tensor<3> {
    let [experts, k, n] = alternating.dims();
    alternating
        .reshape([experts, k, n / step, step])
        .swap_dims(2, 3)
        .reshape([experts, k, n])
}
