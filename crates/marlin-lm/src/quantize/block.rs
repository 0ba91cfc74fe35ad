//! One block that is being quantised: its projections in the order in which they run.

use std::ops::Range;
use std::vec::IntoIter;

use burn::nn::Linear;
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use marlin_format::checkpoint::{Checkpoint, TensorData as FileTensor, compressed_tensors};
use marlin_quant::{
    BlockRunner, CalibratedLayer, FloatActivations, GroupLayer, LayerError, LayerGroup, LayerInputs,
};

use super::hidden::{SampleBatch, unread};
use super::plan::{Plan, Target};
use super::scaling::{Factors, Scales};
use super::walk::{CalibrationWalk, rows, side_by_side};
use crate::ModelError;
use crate::architectures::{BlockShape, ProjectionKind};
use crate::folder::float_dtype;
use crate::model::{Block, Projection, loaded};

/// A block through which the hidden states of a walk pass, projection by projection. The block is
/// held twice: with the quantised projections so far, and with float projections.
pub(super) struct BlockRun<'w, 'a> {
    walk: &'w mut CalibrationWalk<'a>,
    name: String,
    shape: BlockShape,
    scales: Scales,
    quantized: Block,
    float: Block,
    /// The projections that have yet to run.
    left: IntoIter<ProjectionKind>,
    /// The layers that are quantised.
    layers: Vec<CalibratedLayer>,
}

/// A projection of a block.
pub(super) struct Projected<'a> {
    kind: ProjectionKind,
    /// The plans of its layers, in the order of their output features.
    plans: Vec<&'a Plan<'a>>,
    /// The factors of its weight.
    factors: Factors,
}

impl<'w, 'a> BlockRun<'w, 'a> {
    /// Starts a float block with the name `name` in the checkpoint, whose inputs have the scales
    /// `scales`.
    pub(super) fn new(
        walk: &'w mut CalibrationWalk<'a>,
        name: &str,
        shape: BlockShape,
        scales: Scales,
        block: Block,
    ) -> Self {
        let kinds: Vec<ProjectionKind> = shape.projections().map(|shape| shape.kind).collect();
        Self {
            walk,
            name: name.into(),
            shape,
            scales,
            quantized: block.clone(),
            float: block,
            left: kinds.into_iter(),
            layers: Vec::new(),
        }
    }

    /// Passes the block with the weights that an earlier run has quantised.
    pub(super) fn resume(mut self, done: &Checkpoint) -> Result<(), ModelError> {
        while let Some(projected) = self.projected() {
            self.walk
                .pass_float(&self.name, projected.kind, &self.float)?;
            let weight = self.upload(&projected.plans, read(done, &projected.plans)?);
            self.put(&projected, weight)?;
        }
        Ok(())
    }

    /// Returns the quantised layers, and the tensors that AWQ has scaled.
    pub(super) fn finish(self) -> Result<(Vec<CalibratedLayer>, Vec<FileTensor>), ModelError> {
        let scaled = self
            .walk
            .scaled_tensors(&self.name, &self.shape, &self.scales)?;
        Ok((self.layers, scaled))
    }

    /// Returns the next projection.
    fn projected(&mut self) -> Option<Projected<'a>> {
        let kind = self.left.next()?;
        let plans = self.walk.plans_of(&self.name, &self.shape, kind);
        let factors = self.scales.factors(&self.shape, kind, &plans);
        Some(Projected {
            kind,
            plans,
            factors,
        })
    }

    /// Puts one float matmul in the place of a projection, for inputs that are not scaled. `weight`
    /// [K, N] has the values of the quantised weights, multiplied by the factors.
    fn put(&mut self, projected: &Projected<'_>, weight: Tensor<2>) -> Result<(), ModelError> {
        let kind = projected.kind;
        let weight = projected.factors.divide(weight);
        let bias = dense(kind, &self.float).and_then(|linear| linear.bias.clone());
        let projection = Projection::Dense(Linear {
            weight: loaded(weight.cast(self.walk.dtype)),
            bias,
        });
        self.quantized.group_mut(kind).replace(projection);
        // Outputs that are not added to the hidden states leave them as they are.
        if kind.is_residual() {
            self.walk.flush(&self.name)?;
            self.walk.pending = Some((kind, self.quantized.clone()));
        }
        Ok(())
    }

    /// Uploads weights [K, N] of the layers of a projection to the device, side by side in f32.
    fn upload(&self, plans: &[&Plan<'_>], weights: Vec<Vec<f32>>) -> Tensor<2> {
        let k = plans.first().map_or(0, |plan| plan.k());
        let shape = [k, plans.iter().map(|plan| plan.n()).sum()];
        Tensor::from_data(
            TensorData::new(side_by_side(k, weights), shape),
            (self.walk.device, DType::F32),
        )
    }

    /// Returns the float weights of a projection, side by side on the device in f32: those of the
    /// float block, where it has them exactly.
    fn float_weight(&self, projected: &Projected<'_>) -> Result<Tensor<2>, ModelError> {
        let Projected { kind, plans, .. } = projected;
        let dtype = self.walk.dtype;
        let is_exact =
            |plan: &&Plan<'_>| dtype == FloatDType::F32 || dtype == float_dtype(plan.view.dtype());
        match dense(*kind, &self.float).filter(|_| plans.iter().all(is_exact)) {
            Some(linear) => Ok(linear.weight.val().cast(FloatDType::F32)),
            None => {
                let weights = plans.iter().map(|plan| plan.weight());
                Ok(self.upload(plans, weights.collect::<Result<_, _>>()?))
            }
        }
    }
}

impl<'a> BlockRunner for BlockRun<'_, 'a> {
    type Handle = Projected<'a>;
    type Error = ModelError;

    fn next_layers(&mut self) -> Result<Option<LayerGroup<Projected<'a>>>, ModelError> {
        while let Some(projected) = self.projected() {
            let layers = layers(&projected.plans);
            if !layers.is_empty() {
                let scales = self.scales.has(projected.kind);
                return Ok(Some(LayerGroup {
                    layers,
                    tokens: self.walk.tokens(),
                    sums: None,
                    scales: scales.then(|| projected.factors.rows().to_vec()),
                    handle: projected,
                }));
            }
            self.walk
                .pass_float(&self.name, projected.kind, &self.float)?;
            let weight = self.float_weight(&projected)?;
            self.put(&projected, weight)?;
        }
        Ok(None)
    }

    /// Also propagates the float hidden states through the float projection.
    fn visit_inputs(
        &mut self,
        group: &LayerGroup<Projected<'a>>,
        visit: &mut dyn FnMut(LayerInputs) -> Result<(), LayerError>,
    ) -> Result<(), ModelError> {
        let (kind, first) = (group.handle.kind, group.name());
        let (block, float) = (&self.quantized, &self.float);
        self.walk.for_each_batch(first, |walk, index, hidden| {
            let float_hidden = walk.float(index).map_err(|error| unread(first, &error))?;
            let of_batch = walk.batches[index].rows.as_ref();
            let inputs = walk.inputs(kind, block, &hidden, of_batch);
            let visit = &mut |inputs, float| {
                visit(LayerInputs {
                    quantized: rows(inputs),
                    float,
                })
            };
            let Some(float_hidden) = float_hidden else {
                return Ok(visit(inputs, None)?);
            };
            let float_inputs = walk.inputs(kind, float, &float_hidden, of_batch);
            if !kind.is_residual() {
                let float = FloatActivations::Inputs(rows(float_inputs));
                return Ok(visit(inputs, Some(float))?);
            }
            let outputs = float.group(kind).forward_joined(float_inputs);
            // Outputs before hidden states: the difference of two that are close is exact.
            let residual = (outputs.clone() - float.group(kind).forward_joined(inputs.clone()))
                + (float_hidden.clone() - hidden);
            visit(inputs, Some(FloatActivations::Residual(rows(residual))))?;
            walk.put(SampleBatch::float, index, float_hidden + outputs)
                .map_err(|error| unread(first, &error))
        })
    }

    fn weight(&mut self, group: &LayerGroup<Projected<'a>>) -> Result<Tensor<2>, ModelError> {
        let projected = &group.handle;
        if self.walk.quantizer.needs_calibration() {
            self.walk.release_memory(group.name())?;
        }
        release_before(projected.kind, &mut self.float, &self.quantized);
        Ok(projected.factors.multiply(self.float_weight(projected)?))
    }

    fn replace(
        &mut self,
        group: LayerGroup<Projected<'a>>,
        values: Tensor<2>,
        layers: Vec<CalibratedLayer>,
    ) -> Result<(), ModelError> {
        self.layers.extend(layers);
        self.put(&group.handle, values)
    }
}

/// Returns the layers of a projection that are quantised.
fn layers(plans: &[&Plan<'_>]) -> Vec<GroupLayer> {
    let quantized = |(plan, columns): (&&Plan<'_>, Range<usize>)| match &plan.target {
        Target::Quantize(name) => Some(GroupLayer {
            name: name.clone(),
            spec: plan.spec,
            columns,
        }),
        Target::Copy(_) => None,
    };
    plans
        .iter()
        .scan(0, |end, plan| {
            let start = *end;
            *end += plan.n();
            Some((plan, start..*end))
        })
        .filter_map(quantized)
        .collect()
}

/// Returns the values [K, N] of layers that an earlier run has quantised; skipped layers have
/// their float values.
fn read(checkpoint: &Checkpoint, plans: &[&Plan<'_>]) -> Result<Vec<Vec<f32>>, ModelError> {
    let values = |plan: &&Plan<'_>| match &plan.target {
        Target::Copy(_) => plan.weight(),
        Target::Quantize(layer) => {
            Ok(compressed_tensors::to_plain(checkpoint, layer, &plan.spec)?.dequantize())
        }
    };
    plans.iter().map(values).collect()
}

/// Returns the float layer of a projection of a block, if the projection is one float matmul.
fn dense(kind: ProjectionKind, block: &Block) -> Option<&Linear> {
    match block.group(kind).projections() {
        [Projection::Dense(linear)] => Some(linear),
        _ => None,
    }
}

/// Releases the previous projection of a float block, which neither this projection nor a later one
/// needs. The quantised projection replaces it.
fn release_before(kind: ProjectionKind, float: &mut Block, quantized: &Block) {
    let before = ProjectionKind::ALL
        .into_iter()
        .take_while(|&before| before != kind)
        .last();
    if let Some(before) = before
        && let [projection] = quantized.group(before).projections()
    {
        float.group_mut(before).replace(projection.clone());
    }
}
