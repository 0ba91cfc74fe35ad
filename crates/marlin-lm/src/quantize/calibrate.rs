//! Calibration-based quantisation, block by block: each block gets its inputs from the quantised
//! blocks before it.
//!
//! One block is on the device at a time, with as many of the samples' hidden states as have room.
//! The other hidden states are transferred batch by batch ([`Hidden`](super::hidden::Hidden)). The
//! projections of a block are quantised in the order in which they run: qkv, attention output, gate
//! and up, down. Each projection also gets its inputs from the quantised projections before it. For
//! each of the four projections all hidden states are read once. The outputs of two of the
//! projections are added to the hidden states of both models.

use std::ops::{ControlFlow, Range};
use std::thread::{self, JoinHandle};

use burn::nn::Linear;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, s};
use marlin_format::checkpoint::{Checkpoint, TensorData as FileTensor, compressed_tensors};
use marlin_format::{PlainWeight, QuantSpec};
use marlin_quant::{HessianSums, LayerLoss};

use super::hidden::{SampleBatch, unread};
use super::plan::{Plan, Target};
use super::refused;
use super::resume::Partial;
use super::scaling::{Factors, Scales};
use super::walk::{CalibrationWalk, rows, side_by_side};
use crate::ModelError;
use crate::architectures::{BlockShape, ProjectionKind};
use crate::folder::{FileWeights, float_dtype};
use crate::model::{self, Projection, load_block, loaded};

/// The samples of a calibration-based quantiser, and the device and dtype in which the model runs
/// on them.
#[derive(Debug, Clone)]
pub struct Calibration {
    /// The tokens of each sample. Samples may have any length that the model supports;
    /// [`calibration_samples`](crate::calibration_samples) converts texts to samples.
    pub samples: Vec<Vec<u32>>,
    /// The device that runs the model and sums the second moments of its layers' inputs.
    pub device: Device,
    /// The dtype of activations. The default is the checkpoint's dtype if the device computes in
    /// it, otherwise f32.
    pub dtype: Option<FloatDType>,
}

/// A layer that is quantised, and its output features among those of its projection.
struct Chosen<'p> {
    name: &'p str,
    spec: QuantSpec,
    columns: Range<usize>,
}

/// The block that is being quantised.
struct Block<'d> {
    name: String,
    shape: BlockShape,
    /// The weights of the block, if an earlier run has quantised the block.
    done: Option<&'d Checkpoint>,
    scales: Scales,
    quantized: Vec<(PlainWeight, LayerLoss)>,
    on_layer: &'d mut dyn FnMut(&LayerLoss) -> ControlFlow<()>,
}

impl<'a> CalibrationWalk<'a> {
    /// Quantises block `index`, or reads its weights from `partial`, and propagates the hidden
    /// states through the block. `on_layer` is called for each layer that this run or an earlier
    /// run has quantised; if it breaks, the run ends with [`ModelError::Stopped`].
    pub(super) fn block(
        &mut self,
        index: usize,
        partial: &Partial,
        source: &mut FileWeights<'_>,
        on_layer: &mut dyn FnMut(&LayerLoss) -> ControlFlow<()>,
    ) -> Result<(), ModelError> {
        let mut layer = load_block(self.config, source, index)?;
        let shape = self.config.block(index);
        let done = partial.block(index)?;
        for loss in done.iter().flat_map(|(_, losses)| losses) {
            if on_layer(loss).is_break() {
                return Err(ModelError::Stopped);
            }
        }
        let (name, done) = (
            format!("model.layers.{index}"),
            done.as_ref().map(|(checkpoint, _)| checkpoint),
        );
        let scales = match done {
            Some(checkpoint) => Scales::read(checkpoint, &name)?,
            None if self.awq => self.scales(&name, &shape, &layer)?,
            None => Scales::default(),
        };
        let mut block = Block {
            name,
            shape,
            done,
            scales,
            quantized: Vec::new(),
            on_layer,
        };

        let mut float = layer.clone();
        self.release_memory(&block.name)?;
        for kind in ProjectionKind::ALL {
            let projection = self.quantize(&mut block, kind, &layer, &mut float)?;
            layer.group_mut(kind).replace(projection);
            // Outputs that are not added to the hidden states leave them as they are.
            if kind.is_residual() {
                self.flush(&block.name)?;
                self.pending = Some((kind, layer.clone()));
            }
        }
        if done.is_none() {
            let scaled = self.scaled_tensors(&block.name, &block.shape, &block.scales)?;
            let (weights, partial) = (block.quantized, partial.clone());
            self.saved()?;
            self.saving = Some(thread::spawn(move || {
                save(weights, scaled, &partial, index)
            }));
        }
        Ok(())
    }

    /// Waits until the last block is written.
    pub(super) fn saved(&mut self) -> Result<(), ModelError> {
        match self.saving.take().map(JoinHandle::join) {
            Some(Ok(saved)) => saved,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }

    /// Quantises a projection of a block. Returns one float matmul with the values of the quantised
    /// weights, for inputs that are not scaled. Also propagates the float hidden states through the
    /// float projection.
    fn quantize(
        &mut self,
        block: &mut Block<'_>,
        kind: ProjectionKind,
        layer: &model::Block,
        float: &mut model::Block,
    ) -> Result<Projection, ModelError> {
        let plans = self.plans_of(&block.name, block.shape.projection(kind));
        let factors = block.scales.factors(&block.shape, kind, &plans);
        let weight = match block.done {
            Some(checkpoint) => {
                self.pass_float(&block.name, kind, float)?;
                self.upload(&plans, self.read(checkpoint, &plans)?)
            }
            None => self.find(block, &plans, &factors, kind, layer, float)?,
        };
        let weight = factors.divide(weight);
        let bias = dense(kind, float).and_then(|linear| linear.bias.clone());
        Ok(Projection::Dense(Linear {
            weight: loaded(weight.cast(self.dtype)),
            bias,
        }))
    }

    /// Uploads weights [K, N] of the layers of a projection to the device, side by side in f32.
    fn upload(&self, plans: &[&Plan<'_>], weights: Vec<Vec<f32>>) -> Tensor<2> {
        let k = plans.first().map_or(0, |plan| plan.k());
        let shape = [k, plans.iter().map(|plan| plan.n()).sum()];
        Tensor::from_data(
            TensorData::new(side_by_side(k, weights), shape),
            (self.device, DType::F32),
        )
    }

    /// The float weights of a projection, side by side on the device in f32: those of the float
    /// layer, where it has them exactly.
    fn float_weight(
        &self,
        plans: &[&Plan<'_>],
        kind: ProjectionKind,
        float: &model::Block,
    ) -> Result<Tensor<2>, ModelError> {
        let is_exact = |plan: &&Plan<'_>| {
            self.dtype == FloatDType::F32 || self.dtype == float_dtype(plan.view.dtype())
        };
        match dense(kind, float).filter(|_| plans.iter().all(is_exact)) {
            Some(linear) => Ok(linear.weight.val().cast(FloatDType::F32)),
            None => Ok(self.upload(
                plans,
                plans
                    .iter()
                    .map(|plan| plan.weight())
                    .collect::<Result<_, _>>()?,
            )),
        }
    }

    /// Returns the values [K, N] of layers that an earlier run has quantised; skipped layers have
    /// their float values.
    fn read(
        &self,
        checkpoint: &Checkpoint,
        plans: &[&Plan<'_>],
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        let values = |plan: &&Plan<'_>| match &plan.target {
            Target::Copy(_) => plan.weight(),
            Target::Quantize(layer) => {
                Ok(compressed_tensors::to_plain(checkpoint, layer, &plan.spec)?.dequantize())
            }
        };
        plans.iter().map(values).collect()
    }

    /// Returns the Hessian sums of the inputs of a projection, with [`K`](HessianSums::features)
    /// features, in `layer` and in the float block. Also propagates the float hidden states through
    /// the projection. `first` is the layer that errors name.
    fn sums(
        &mut self,
        first: &str,
        kind: ProjectionKind,
        k: usize,
        layer: &model::Block,
        float: &model::Block,
    ) -> Result<HessianSums, ModelError> {
        let failed = |error| refused(first, error);
        let mut sums = HessianSums::new(k, self.device);
        self.for_each_batch(first, |walk, index, quantized| {
            let hidden = walk.float(index).map_err(|error| unread(first, &error))?;
            let of_batch = walk.batches[index].rows.as_ref();
            let inputs = walk.inputs(kind, layer, &quantized, of_batch);
            let Some(hidden) = hidden else {
                return sums.add(rows(inputs)).map_err(failed);
            };
            let float_inputs = walk.inputs(kind, float, &hidden, of_batch);
            if !kind.is_residual() {
                return sums
                    .add_beside(rows(inputs), rows(float_inputs))
                    .map_err(failed);
            }
            let outputs = float.group(kind).forward_joined(float_inputs);
            // Outputs before hidden states: the difference of two that are close is exact.
            let residual = (outputs.clone() - float.group(kind).forward_joined(inputs.clone()))
                + (hidden.clone() - quantized);
            sums.add_with_residual(rows(inputs), rows(residual))
                .map_err(failed)?;
            walk.put(SampleBatch::float, index, hidden + outputs)
                .map_err(|error| unread(first, &error))
        })?;
        Ok(sums)
    }

    /// Quantises layers of the same inputs, with their weights multiplied by `factors`. Returns
    /// their values side by side, [K, N] in f32.
    fn find(
        &mut self,
        block: &mut Block<'_>,
        plans: &[&'a Plan<'a>],
        factors: &Factors,
        kind: ProjectionKind,
        layer: &model::Block,
        float: &mut model::Block,
    ) -> Result<Tensor<2>, ModelError> {
        let chosen = |(plan, columns): (&&'a Plan<'a>, Range<usize>)| match &plan.target {
            Target::Quantize(name) => Some(Chosen {
                name,
                spec: plan.spec,
                columns,
            }),
            Target::Copy(_) => None,
        };
        let mut rest: Vec<Chosen<'_>> = plans
            .iter()
            .zip(ranges(plans.iter().map(|plan| plan.n())))
            .filter_map(chosen)
            .collect();
        let Some(first) = rest.first() else {
            self.pass_float(&block.name, kind, float)?;
            return self.float_weight(plans, kind, float);
        };

        let mut sums = None;
        if self.quantizer.needs_calibration() {
            let found = self.sums(first.name, kind, plans[0].k(), layer, float)?;
            sums = Some(if block.scales.has(kind) {
                found.divided(factors.rows())
            } else {
                found
            });
            self.release_memory(first.name)?;
        }
        release_before(kind, float, layer);
        let mut weight = factors.multiply(self.float_weight(plans, kind, float)?);
        if rest.len() == plans.len() && rest.iter().all(|layer| layer.spec == first.spec) {
            return self.round(block, &rest, weight, sums.as_ref());
        }
        while let [Chosen { spec, .. }, ..] = rest[..] {
            let layers: Vec<Chosen<'_>> = rest.extract_if(.., |layer| layer.spec == spec).collect();
            let parts = layers
                .iter()
                .map(|layer| weight.clone().slice(s![.., layer.columns.clone()]))
                .collect();
            let values = self.round(block, &layers, Tensor::cat(parts, 1), sums.as_ref())?;
            for (layer, columns) in layers
                .iter()
                .zip(ranges(layers.iter().map(|layer| layer.columns.len())))
            {
                weight = weight.slice_assign(
                    s![.., layer.columns.clone()],
                    values.clone().slice(s![.., columns]),
                );
            }
        }
        Ok(weight)
    }

    /// Quantises layers of one spec, and returns their values. `weight` [K, N] has the output
    /// features of the layers side by side.
    fn round(
        &self,
        block: &mut Block<'_>,
        layers: &[Chosen<'_>],
        weight: Tensor<2>,
        sums: Option<&HessianSums>,
    ) -> Result<Tensor<2>, ModelError> {
        // Output features are independent of each other: one factorisation serves them all.
        let Chosen { name, spec, .. } = layers[0];
        let (found, values) = self
            .quantizer
            .quantize_on_device(weight, sums, &spec)
            .map_err(|error| refused(name, error))?;
        for (Chosen { name, .. }, columns) in layers
            .iter()
            .zip(ranges(layers.iter().map(|layer| layer.columns.len())))
        {
            let plain =
                found
                    .weight
                    .slice_n(columns.clone())
                    .map_err(|source| ModelError::Quantize {
                        layer: (*name).into(),
                        source,
                    })?;
            let loss = LayerLoss::new(name, self.tokens(), &found, columns);
            if (block.on_layer)(&loss).is_break() {
                return Err(ModelError::Stopped);
            }
            block.quantized.push((plain, loss));
        }
        Ok(values)
    }
}

/// Returns the float layer of a projection of a block, if the projection is one float matmul.
fn dense(kind: ProjectionKind, block: &model::Block) -> Option<&Linear> {
    match block.group(kind).projections() {
        [Projection::Dense(linear)] => Some(linear),
        _ => None,
    }
}

/// Releases the previous projection of a float block, which neither this projection nor a later one
/// needs. The quantised projection replaces it.
fn release_before(kind: ProjectionKind, float: &mut model::Block, layer: &model::Block) {
    let before = ProjectionKind::ALL
        .into_iter()
        .take_while(|&before| before != kind)
        .last();
    if let Some(before) = before
        && let [projection] = layer.group(before).projections()
    {
        float.group_mut(before).replace(projection.clone());
    }
}

/// Writes a block's weights and losses, and the tensors that AWQ has scaled.
fn save(
    quantized: Vec<(PlainWeight, LayerLoss)>,
    scaled: Vec<FileTensor>,
    partial: &Partial,
    index: usize,
) -> Result<(), ModelError> {
    let (weights, losses): (Vec<PlainWeight>, Vec<LayerLoss>) = quantized.into_iter().unzip();
    let quantized = weights
        .iter()
        .zip(&losses)
        .flat_map(|(weight, loss)| compressed_tensors::tensors_of(&loss.layer, weight));
    let tensors: Vec<FileTensor> = quantized.chain(scaled).collect();
    let mut writer = partial.writer(index, &losses)?;
    writer.declare(tensors.iter().map(|tensor| tensor.spec.clone()))?;
    for tensor in tensors {
        writer.write_tensor(&tensor.spec.name, &tensor.bytes)?;
    }
    Ok(writer.finish()?)
}

/// Returns the ranges of consecutive parts of these lengths.
fn ranges(lengths: impl Iterator<Item = usize>) -> impl Iterator<Item = Range<usize>> {
    lengths.scan(0, |end, length| {
        let start = *end;
        *end += length;
        Some(start..*end)
    })
}
