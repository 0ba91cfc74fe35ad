//! Propagation of the samples' hidden states through the blocks of two models: the float model and
//! the model that is being quantised.

use std::collections::HashMap;
use std::thread::JoinHandle;

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_marlin::host::ReadError;
use marlin_nn::{self as decode, CacheShape, SequenceState};
use marlin_quant::Quantizer;
use rayon::prelude::*;

use super::hidden::{Hidden, SampleBatch, budgets, unread};
use super::plan::Plan;
use crate::ModelError;
use crate::architectures::{BlockShape, ProjectionKind, ProjectionShape};
use crate::config::ModelConfig;
use crate::folder::FileWeights;
use crate::model::{self, Attention, Block, KeyValues, Rope, Span, WeightSource};
use crate::tokens::token_tensor;

/// The limit on the size of the largest tensor in a batch of samples, in bytes.
const BATCH_BYTES: usize = 1 << 28;

/// The state of a calibration, which propagates hidden states block by block.
pub(super) struct CalibrationWalk<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) plans: &'a [Plan<'a>],
    /// The plans by the names of their layers in the target.
    pub(super) plans_by_name: HashMap<&'a str, &'a Plan<'a>>,
    pub(super) quantizer: &'a dyn Quantizer,
    /// True if inputs are scaled before weights are quantised.
    pub(super) awq: bool,
    /// True if every expert is calibrated with all tokens.
    pub(super) route_all: bool,
    pub(super) device: &'a Device,
    pub(super) dtype: FloatDType,
    pub(super) rope: Rope,
    /// The hidden states [samples, seq, hidden] of each batch, before the projection that is
    /// quantised.
    pub(super) batches: Vec<SampleBatch>,
    /// The projection whose outputs are not yet added to the quantised hidden states. The outputs
    /// are added when the hidden states are next read, so that hidden states are transferred only
    /// once.
    pub(super) pending: Option<(ProjectionKind, Block)>,
    /// The block that is being written while the next one is quantised.
    pub(super) saving: Option<JoinHandle<Result<(), ModelError>>>,
}

impl<'a> CalibrationWalk<'a> {
    /// Computes the embeddings of the samples, in batches of samples of one length.
    pub(super) fn embed(
        &mut self,
        samples: &[Vec<u32>],
        source: &mut FileWeights<'_>,
    ) -> Result<(), ModelError> {
        let shape = [self.config.vocab_size, self.config.hidden_size];
        let table = source.embedding("model.embed_tokens", shape)?.val();
        let has_flash = decode::has_flash_attention(self.device, self.dtype, self.config.head_dim);
        let failed = |error| unread("model.embed_tokens", &error);
        let tokens: usize = samples.iter().map(Vec::len).sum();
        let [mut budget, mut float_budget] = budgets(
            self.device,
            tokens * self.config.hidden_size * DType::from(self.dtype).size(),
        );
        let mut sorted: Vec<&Vec<u32>> = samples.iter().collect();
        sorted.sort_by_key(|sample| sample.len());
        for samples in sorted.chunk_by(|a, b| a.len() == b.len()) {
            let seq = samples[0].len();
            let is_flash = has_flash && seq <= decode::MAX_PASS_ROWS;
            // The outputs of gate and up, and without flash attention the scores in f32.
            let widths = self
                .config
                .experts
                .iter()
                .map(|of| of.top_k * of.intermediate_size);
            let width = widths.fold(self.config.intermediate_size, usize::max);
            let mlp = 2 * width * DType::from(self.dtype).size();
            let widest = if is_flash {
                mlp
            } else {
                mlp.max(4 * self.config.num_attention_heads * seq)
            };
            let most_tokens = if is_flash {
                (BATCH_BYTES / widest).min(decode::MAX_PASS_ROWS)
            } else {
                BATCH_BYTES / widest
            };
            for batch in samples.chunks((most_tokens / seq).max(1)) {
                let tokens: Vec<u32> = batch
                    .iter()
                    .flat_map(|sample| sample.iter().copied())
                    .collect();
                let rows = is_flash.then(|| prompt_rows(&tokens, seq, self.device));
                let hidden = burn::tensor::module::embedding(
                    table.clone(),
                    token_tensor(&tokens, [batch.len(), seq], self.device),
                );
                let quantized = Hidden::new(hidden.clone(), &mut budget).map_err(failed)?;
                let looks = self.quantizer.needs_calibration();
                let float = looks
                    .then(|| Hidden::new(hidden, &mut float_budget))
                    .transpose()
                    .map_err(failed)?;
                self.batches.push(SampleBatch {
                    tokens: tokens.len(),
                    quantized,
                    float,
                    rows,
                });
                if let [.., before, _] = &mut self.batches[..] {
                    before.quantized.arrive().map_err(failed)?;
                    before
                        .float
                        .as_mut()
                        .map_or(Ok(()), Hidden::arrive)
                        .map_err(failed)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the hidden states of a batch after the float layers, on the device; `None` if the
    /// quantiser is not calibration-based.
    pub(super) fn float(&mut self, index: usize) -> Result<Option<Tensor<3>>, ReadError> {
        self.batches[index]
            .float
            .as_mut()
            .map(|float| float.get(self.device))
            .transpose()
    }

    /// Returns the hidden states of a batch after the quantised layers, on the device. The outputs
    /// of the pending projection are added first.
    fn quantized(&mut self, index: usize) -> Result<Tensor<3>, ReadError> {
        let hidden = self.batches[index].quantized.get(self.device)?;
        let Some((kind, layer)) = &self.pending else {
            return Ok(hidden);
        };
        let outputs = self.outputs(*kind, layer, &hidden, self.batches[index].rows.as_ref());
        let hidden = hidden + outputs;
        self.put(SampleBatch::quantized, index, hidden.clone())?;
        Ok(hidden)
    }

    /// Replaces the hidden states of a batch in one of the models. While they are copied to the
    /// host, the next batch is computed, but no further batch: hidden states occupy the device
    /// until their copy is complete.
    pub(super) fn put(
        &mut self,
        of: fn(&mut SampleBatch) -> Option<&mut Hidden>,
        index: usize,
        states: Tensor<3>,
    ) -> Result<(), ReadError> {
        if let Some(hidden) = of(&mut self.batches[index]) {
            hidden.set(states)?;
        }
        match index
            .checked_sub(1)
            .and_then(|before| of(&mut self.batches[before]))
        {
            Some(before) => before.arrive(),
            None => Ok(()),
        }
    }

    /// Calls `visit` with the quantised hidden states of each batch, and the batch's index. `at` is
    /// the layer or the block that errors name.
    pub(super) fn for_each_batch(
        &mut self,
        at: &str,
        mut visit: impl FnMut(&mut Self, usize, Tensor<3>) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        for index in 0..self.batches.len() {
            let hidden = self.quantized(index).map_err(|error| unread(at, &error))?;
            visit(self, index, hidden)?;
        }
        self.pending = None;
        Ok(())
    }

    /// Takes the quantised hidden states past the projection that they have yet to pass, where
    /// nothing has looked at them since.
    pub(super) fn flush(&mut self, block: &str) -> Result<(), ModelError> {
        if self.pending.is_some() {
            self.for_each_batch(block, |_, _, _| Ok(()))
        } else {
            Ok(())
        }
    }

    /// Returns the outputs of a projection of a block for hidden states [samples, seq, hidden]. The
    /// outputs of the last one are those of the feed-forward network, a mixture included.
    pub(super) fn outputs(
        &self,
        kind: ProjectionKind,
        layer: &Block,
        hidden: &Tensor<3>,
        rows: Option<&model::PassBatch>,
    ) -> Tensor<3> {
        match (kind, layer.mixture()) {
            (ProjectionKind::Down, Some(mixture)) => {
                let x = layer.feed_forward_norm.forward(hidden.clone());
                let logits = mixture.router.forward(x.clone());
                mixture.forward(x, logits)
            }
            _ => layer
                .group(kind)
                .forward_joined(self.inputs(kind, layer, hidden, rows)),
        }
    }

    /// Returns the inputs [samples, seq, K] of a projection of a block, computed from the hidden
    /// states before the mixer or the feed-forward network. `rows` are the rows of the batch.
    pub(super) fn inputs(
        &self,
        kind: ProjectionKind,
        layer: &Block,
        hidden: &Tensor<3>,
        rows: Option<&model::PassBatch>,
    ) -> Tensor<3> {
        match kind {
            ProjectionKind::Qkv => layer.mixer_norm.forward(hidden.clone()),
            ProjectionKind::Output => {
                let inputs = self.inputs(ProjectionKind::Qkv, layer, hidden, rows);
                let qkv = layer.group(ProjectionKind::Qkv).forward_joined(inputs);
                self.mix(layer.attention(), qkv, rows)
            }
            ProjectionKind::GateUp => layer.feed_forward_norm.forward(hidden.clone()),
            ProjectionKind::Down => {
                let inputs = self.inputs(ProjectionKind::GateUp, layer, hidden, rows);
                let gate_up = layer.group(ProjectionKind::GateUp);
                decode::apply(gate_up.epilogue(), gate_up.forward_joined(inputs))
            }
        }
    }

    /// Computes attention without its output projection, [samples, seq, K], from queries, keys and
    /// values side by side.
    fn mix(
        &self,
        attention: &Attention,
        qkv: Tensor<3>,
        rows: Option<&model::PassBatch>,
    ) -> Tensor<3> {
        let [samples, seq, columns] = qkv.dims();
        let Some(rows) = rows else {
            let span = Span::new(
                &self.rope,
                0,
                seq,
                attention.window,
                self.dtype,
                self.device,
            );
            return attention.mix_prompt(qkv, &span, None);
        };
        let (kv_heads, head_dim) = (attention.kv_heads, attention.head_dim);
        let shape = CacheShape::from([samples, kv_heads, seq, head_dim]);
        let mut cache = KeyValues::new(&shape, self.dtype, self.device);
        let mixed = attention.mix_rows(
            qkv.reshape([samples * seq, columns]),
            &self.rope,
            cache.with_pages(None, None),
            rows,
        );
        let features = mixed.dims()[1];
        mixed.reshape([samples, seq, features])
    }

    /// Returns the plans of the layers of a projection of a block, in the order of their output
    /// features.
    pub(super) fn plans_of(
        &self,
        block: &str,
        shape: &BlockShape,
        kind: ProjectionKind,
    ) -> Vec<&'a Plan<'a>> {
        let is_named = |plan: &&Plan<'_>, name: &str| {
            plan.source()
                .strip_prefix(block)
                .is_some_and(|rest| rest.strip_prefix('.') == Some(name))
        };
        shape
            .projection(kind)
            .into_iter()
            .flat_map(ProjectionShape::names)
            .flat_map(|name| self.plans.iter().filter(move |plan| is_named(plan, name)))
            .collect()
    }

    /// Returns the plans of layers with these names, in their order.
    pub(super) fn plans_named(&self, names: &[String]) -> Vec<&'a Plan<'a>> {
        let named = |name: &String| self.plans_by_name.get(name.as_str()).copied();
        names.iter().filter_map(named).collect()
    }

    /// Returns the number of tokens of all samples.
    pub(super) fn tokens(&self) -> usize {
        self.batches.iter().map(|batch| batch.tokens).sum()
    }

    /// Adds the outputs of a projection of a float block to the float hidden states. Does nothing
    /// for a projection whose outputs are not added to the hidden states.
    pub(super) fn pass_float(
        &mut self,
        block: &str,
        kind: ProjectionKind,
        layer: &Block,
    ) -> Result<(), ModelError> {
        if !kind.is_residual() {
            return Ok(());
        }
        for index in 0..self.batches.len() {
            let Some(hidden) = self.float(index).map_err(|error| unread(block, &error))? else {
                continue;
            };
            let outputs = self.outputs(kind, layer, &hidden, self.batches[index].rows.as_ref());
            self.put(SampleBatch::float, index, hidden + outputs)
                .map_err(|error| unread(block, &error))?;
        }
        Ok(())
    }

    /// Releases the memory that the allocators of the device and the host keep for freed tensors,
    /// since the next tensors have other sizes.
    pub(super) fn release_memory(&self, at: &str) -> Result<(), ModelError> {
        self.device
            .sync()
            .map_err(|error| ModelError::HiddenStates {
                block: at.into(),
                reason: error.to_string(),
            })?;
        self.device.memory_cleanup();
        Ok(())
    }
}

/// Reshapes [samples, seq, features] to [tokens, features].
pub(super) fn rows(tensor: Tensor<3>) -> Tensor<2> {
    let [samples, seq, features] = tensor.dims();
    tensor.reshape([samples * seq, features])
}

/// Creates rows of prompts from the tokens of samples of `seq` tokens, with one slot for each
/// sample.
fn prompt_rows(tokens: &[u32], seq: usize, device: &Device) -> model::PassBatch {
    let of_token = |(index, &token): (usize, &u32)| {
        SequenceState::of_prompt(token, (index % seq) as u32, (index / seq) as u32)
    };
    let rows: Vec<SequenceState> = tokens.iter().enumerate().map(of_token).collect();
    let mut batch = model::PassBatch::prompts(rows.len(), 0, rows.len() / seq, device);
    batch.set_prompts(&rows, &[]);
    batch
}

/// Joins weights [K, N] with their output features side by side.
pub(super) fn side_by_side(k: usize, weights: Vec<Vec<f32>>) -> Vec<f32> {
    let weights = match <[Vec<f32>; 1]>::try_from(weights) {
        Ok([weight]) => return weight,
        Err(weights) => weights,
    };
    let widths: Vec<usize> = weights.iter().map(|weight| weight.len() / k).collect();
    let mut joined = vec![0.0; weights.iter().map(Vec::len).sum()];
    joined
        .par_chunks_exact_mut(widths.iter().sum::<usize>().max(1))
        .enumerate()
        .for_each(|(row, mut line)| {
            for (weight, &width) in weights.iter().zip(&widths) {
                let (part, rest) = line.split_at_mut(width);
                part.copy_from_slice(&weight[row * width..(row + 1) * width]);
                line = rest;
            }
        });
    joined
}
