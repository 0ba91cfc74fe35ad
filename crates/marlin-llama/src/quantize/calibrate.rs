//! Quantisers that look at data, block after block: each sees the inputs that the quantised blocks before it give.
//!
//! One block is on the device at a time, with the hidden states of all samples. Within a block the layers go in the order in which they run, and each layer
//! sees what the quantised layers before it give, too: attention's inputs, its output, the MLP's inputs, its output.

use std::ops::ControlFlow;

use burn::nn::Linear;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use marlin_decode as decode;
use marlin_format::checkpoint::{Checkpoint, TensorData as FileTensor, compressed_tensors};
use marlin_format::{PlainWeight, QuantSpec};
use marlin_quant::{HessianSums, Quantizer};
use serde::{Deserialize, Serialize};

use super::plan::{Plan, Target};
use super::refused;
use super::resume::Partial;
use crate::LlamaError;
use crate::config::LlamaConfig;
use crate::folder::FileWeights;
use crate::model::{Attention, Layer, Projection, ProjectionGroup, Rope, Span, WeightSource, load_layer, loaded};
use crate::tokens::token_tensor;

/// The texts that a quantiser looks at, and where the model runs on them.
#[derive(Debug, Clone)]
pub struct Calibration {
    /// The tokens of each sample, of any lengths that the model takes: [`calibration_samples`](crate::calibration_samples) makes them of texts.
    pub samples: Vec<Vec<u32>>,
    /// The device that runs the model and sums the second moments of its layers' inputs.
    pub device: Device,
    /// The dtype of activations; by default that of the checkpoint if the device computes in it, otherwise f32.
    pub dtype: Option<FloatDType>,
}

/// What a quantiser says of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerLoss {
    /// Its name.
    pub layer: String,
    /// Tokens that it saw.
    pub tokens: usize,
    /// The squared error that is left of a token's outputs, all together, where the quantiser knows it.
    pub loss: Option<f64>,
    /// The part of the mean of the Hessian's diagonal that was added to it.
    pub damping: Option<f64>,
    /// Input features that were zero in every token.
    pub dead: usize,
    /// True if it saw too few tokens, and was rounded.
    pub fell_back: bool,
}

/// The projections of a block by their inputs, in the order in which they run; of an architecture those that its checkpoints have.
const QKV: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"];
const O: [&str; 1] = ["self_attn.o_proj"];
const GATE_UP: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"];
const DOWN: [&str; 1] = ["mlp.down_proj"];

/// Elements of the largest tensor that samples are batched up to: 256 MiB in f32.
const BATCH_ELEMENTS: usize = 1 << 26;

/// A walk through the blocks of a model.
pub(super) struct Walk<'a> {
    pub(super) config: &'a LlamaConfig,
    pub(super) plans: &'a [Plan<'a>],
    pub(super) spec: &'a QuantSpec,
    pub(super) quantizer: &'a dyn Quantizer,
    pub(super) device: &'a Device,
    pub(super) dtype: FloatDType,
    pub(super) rope: Rope,
    /// Hidden states [samples, seq, hidden] before the block.
    pub(super) batches: Vec<Tensor<3>>,
}

/// A block on its way.
struct Block<'d> {
    name: String,
    /// Its weights, where an earlier run has quantised it.
    done: Option<&'d Checkpoint>,
    quantized: Vec<(PlainWeight, LayerLoss)>,
    on_layer: &'d mut dyn FnMut(&LayerLoss) -> ControlFlow<()>,
}

impl Walk<'_> {
    /// The embeddings of the samples, those of one length together.
    pub(super) fn embed(&mut self, samples: &[Vec<u32>], source: &mut FileWeights<'_>) -> Result<(), LlamaError> {
        let shape = [self.config.vocab_size, self.config.hidden_size];
        let table = source.embedding("model.embed_tokens", shape)?.val();
        let mut sorted: Vec<&Vec<u32>> = samples.iter().collect();
        sorted.sort_by_key(|sample| sample.len());
        for samples in sorted.chunk_by(|a, b| a.len() == b.len()) {
            let seq = samples[0].len();
            // Scores of attention, or the MLP's inputs.
            let widest = (self.config.num_attention_heads * seq).max(2 * self.config.intermediate_size);
            for batch in samples.chunks((BATCH_ELEMENTS / widest / seq).max(1)) {
                let tokens: Vec<u32> = batch.iter().flat_map(|sample| sample.iter().copied()).collect();
                let tokens = token_tensor(&tokens, [batch.len(), seq], self.device);
                self.batches.push(burn::tensor::module::embedding(table.clone(), tokens));
            }
        }
        Ok(())
    }

    /// Quantises block `index`, or takes its weights from `partial`, and walks past it. `on_layer` is called for each layer that is quantised; where it
    /// breaks, the walk ends.
    pub(super) fn block(
        &mut self,
        index: usize,
        partial: &Partial,
        source: &mut FileWeights<'_>,
        on_layer: &mut dyn FnMut(&LayerLoss) -> ControlFlow<()>,
    ) -> Result<(), LlamaError> {
        let mut layer = load_layer(self.config, source, index)?;
        let done = partial.block(index)?;
        let mut block = Block {
            name: format!("model.layers.{index}"),
            done: done.as_ref().map(|(checkpoint, _)| checkpoint),
            quantized: Vec::new(),
            on_layer,
        };

        let inputs = |hidden: Tensor<3>| layer.input_layernorm.forward(hidden);
        let qkv = self.quantize(&mut block, &QKV, layer.self_attn.qkv_proj.joined(), inputs)?;
        let outputs = layer.self_attn.qkv_proj.outputs().to_vec();
        layer.self_attn.qkv_proj = ProjectionGroup::new(vec![qkv], outputs);

        layer.self_attn.o_proj = self.quantize(&mut block, &O, Some(&layer.self_attn.o_proj), |hidden| self.mixed(&layer, hidden))?;
        self.batches = self.walked(|hidden| hidden.clone() + layer.self_attn.o_proj.forward(self.mixed(&layer, hidden)));

        let inputs = |hidden: Tensor<3>| layer.post_attention_layernorm.forward(hidden);
        let gate_up = self.quantize(&mut block, &GATE_UP, layer.mlp.gate_up_proj.joined(), inputs)?;
        let outputs = layer.mlp.gate_up_proj.outputs().to_vec();
        layer.mlp.gate_up_proj = ProjectionGroup::new(vec![gate_up], outputs);

        layer.mlp.down_proj = self.quantize(&mut block, &DOWN, Some(&layer.mlp.down_proj), |hidden| gated(&layer, hidden))?;
        self.batches = self.walked(|hidden| hidden.clone() + layer.mlp.down_proj.forward(gated(&layer, hidden)));
        if done.is_none() {
            block.save(partial, index)?;
        }
        Ok(())
    }

    /// The hidden states after a part of the block.
    fn walked(&self, part: impl Fn(Tensor<3>) -> Tensor<3>) -> Vec<Tensor<3>> {
        self.batches.iter().map(|hidden| part(hidden.clone())).collect()
    }

    /// Attention's outputs before its last projection, [samples, seq, heads * head_dim].
    fn mixed(&self, layer: &Layer, hidden: Tensor<3>) -> Tensor<3> {
        let Attention { qkv_proj, window, .. } = &layer.self_attn;
        let span = Span::new(&self.rope, 0, hidden.dims()[1], *window, self.dtype, self.device);
        layer.self_attn.mix_prompt(qkv_proj.forward_joined(layer.input_layernorm.forward(hidden)), &span, None)
    }

    /// The projections `names` of a block as one, with the values of their quantised weights; `inputs` makes their inputs of hidden states. `float` is their float
    /// form.
    fn quantize(
        &self,
        block: &mut Block<'_>,
        names: &[&str],
        float: Option<&Projection>,
        inputs: impl Fn(Tensor<3>) -> Tensor<3>,
    ) -> Result<Projection, LlamaError> {
        let is_named =
            |plan: &&Plan<'_>, name: &str| plan.source().strip_prefix(&block.name).is_some_and(|rest| rest.strip_prefix('.') == Some(name));
        let plans: Vec<&Plan<'_>> = names.iter().flat_map(|name| self.plans.iter().filter(move |plan| is_named(plan, name))).collect();
        let weights = match block.done {
            Some(checkpoint) => self.read(checkpoint, &plans)?,
            None => self.find(block, &plans, inputs)?,
        };
        let k = plans.first().map_or(0, |plan| plan.k());
        let joined = side_by_side(k, &weights);
        let weight = Tensor::from_data(
            TensorData::new(joined, [k, weights.iter().map(|weight| weight.len()).sum::<usize>() / k.max(1)]),
            (self.device, self.dtype.into()),
        );
        let bias = match float {
            Some(Projection::Dense(Linear { bias, .. })) => bias.clone(),
            _ => None,
        };
        Ok(Projection::Dense(Linear { weight: loaded(weight), bias }))
    }

    /// The values [K, N] of layers that an earlier run has quantised.
    fn read(&self, checkpoint: &Checkpoint, plans: &[&Plan<'_>]) -> Result<Vec<Vec<f32>>, LlamaError> {
        let values = |plan: &&Plan<'_>| match &plan.target {
            Target::Copy(_) => plan.weight(),
            Target::Quantize(layer) => Ok(compressed_tensors::to_plain(checkpoint, layer, self.spec)?.dequantize()),
        };
        plans.iter().map(values).collect()
    }

    /// Quantises layers of the same inputs, and returns their values [K, N].
    fn find(
        &self,
        block: &mut Block<'_>,
        plans: &[&Plan<'_>],
        inputs: impl Fn(Tensor<3>) -> Tensor<3>,
    ) -> Result<Vec<Vec<f32>>, LlamaError> {
        let mut weights = plans.iter().map(|plan| plan.weight()).collect::<Result<Vec<_>, _>>()?;
        let layers: Vec<(usize, &str)> = plans
            .iter()
            .enumerate()
            .filter_map(|(index, plan)| match &plan.target {
                Target::Quantize(layer) => Some((index, layer.as_str())),
                Target::Copy(_) => None,
            })
            .collect();
        let [(first, name), ..] = layers[..] else { return Ok(weights) };
        let failed = |error| refused(name, error);

        let k = plans[first].k();
        let mut sums = HessianSums::new(k, self.device);
        for hidden in &self.batches {
            let inputs = inputs(hidden.clone());
            let [samples, seq, _] = inputs.dims();
            sums.add(inputs.reshape([samples * seq, k])).map_err(failed)?;
        }
        let hessian = sums.finish().map_err(failed)?;
        // Output features are independent of each other: one factorisation serves all layers.
        let joined = side_by_side(k, &layers.iter().map(|&(index, _)| std::mem::take(&mut weights[index])).collect::<Vec<_>>());
        let found = self.quantizer.quantize(&joined, k, joined.len() / k, Some(&hessian), self.spec).map_err(failed)?;
        drop(joined);
        let mut start = 0;
        for (index, name) in layers {
            let columns = start..start + plans[index].n();
            start = columns.end;
            let plain = found.weight.slice_n(columns.clone()).map_err(|source| LlamaError::Quantize { layer: name.into(), source })?;
            weights[index] = plain.dequantize();
            let loss = LayerLoss {
                layer: name.into(),
                tokens: hessian.tokens(),
                loss: found.losses.as_ref().map(|losses| losses[columns].iter().sum()),
                damping: found.damping,
                dead: found.dead,
                fell_back: found.fell_back,
            };
            if (block.on_layer)(&loss).is_break() {
                return Err(LlamaError::Stopped);
            }
            block.quantized.push((plain, loss));
        }
        Ok(weights)
    }
}

impl Block<'_> {
    /// Writes the block's weights and losses.
    fn save(self, partial: &Partial, index: usize) -> Result<(), LlamaError> {
        let (weights, losses): (Vec<PlainWeight>, Vec<LayerLoss>) = self.quantized.into_iter().unzip();
        let tensors: Vec<FileTensor> =
            weights.iter().zip(&losses).flat_map(|(weight, loss)| compressed_tensors::tensors_of(&loss.layer, weight)).collect();
        let mut writer = partial.writer(index, &losses)?;
        writer.declare(tensors.iter().map(|tensor| tensor.spec.clone()))?;
        for tensor in tensors {
            writer.write_tensor(&tensor.spec.name, &tensor.bytes)?;
        }
        Ok(writer.finish()?)
    }
}

/// The MLP's inputs of its last projection, [samples, seq, intermediate].
fn gated(layer: &Layer, hidden: Tensor<3>) -> Tensor<3> {
    decode::silu_mul(layer.mlp.gate_up_proj.forward_joined(layer.post_attention_layernorm.forward(hidden)))
}

/// Weights [K, N] with their output features side by side.
fn side_by_side(k: usize, weights: &[Vec<f32>]) -> Vec<f32> {
    let row = |row: usize| weights.iter().flat_map(move |weight| &weight[row * (weight.len() / k)..(row + 1) * (weight.len() / k)]);
    (0..k).flat_map(row).copied().collect()
}
