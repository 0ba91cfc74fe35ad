//! One block that is being quantised: its projections in the order in which they run.

use std::ops::Range;
use std::vec::IntoIter;

use burn::nn::Linear;
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use marlin_format::checkpoint::{Checkpoint, TensorData as FileTensor, compressed_tensors};
use marlin_quant::{
    BlockRunner, CalibratedLayer, FloatActivations, GroupLayer, LayerError, LayerGroup, LayerInputs,
};

use super::experts::{Chosen, ExpertMatmul};
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
    /// The matmuls that have yet to run.
    left: IntoIter<Matmul>,
    /// The experts of the samples' tokens, once they are known.
    chosen: Option<Chosen>,
    /// The layers that are quantised.
    layers: Vec<CalibratedLayer>,
}

/// A matmul of a block, whose layers have the same inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Matmul {
    Projection(ProjectionKind),
    Expert(ExpertMatmul),
}

/// A matmul of a block, with its layers.
pub(super) struct Projected<'a> {
    matmul: Matmul,
    /// The plans of its layers, in the order of their output features; none of experts that stay
    /// float in one tensor.
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
        let projections = shape.projections();
        let mut left: Vec<Matmul> = projections
            .map(|shape| Matmul::Projection(shape.kind))
            .collect();
        let experts = shape.experts().into_iter().flat_map(ExpertMatmul::all);
        left.extend(experts.map(Matmul::Expert));
        Self {
            walk,
            name: name.into(),
            shape,
            scales,
            quantized: block.clone(),
            float: block,
            left: left.into_iter(),
            chosen: None,
            layers: Vec::new(),
        }
    }

    /// Passes the block with the weights that an earlier run has quantised.
    pub(super) fn resume(mut self, done: &Checkpoint) -> Result<(), ModelError> {
        while let Some(projected) = self.projected() {
            self.pass_float(projected.matmul)?;
            let weight = match layers(&projected.plans).is_empty() {
                true => self.float_weight(&projected)?,
                false => self.upload(&projected.plans, read(done, &projected.plans)?),
            };
            self.put(&projected, weight)?;
        }
        self.pass_mixture()
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
        let matmul = self.left.next()?;
        let plans = match (matmul, self.shape.experts()) {
            (Matmul::Projection(kind), _) => self.walk.plans_of(&self.name, &self.shape, kind),
            (Matmul::Expert(matmul), Some(experts)) => {
                self.walk.plans_named(&matmul.layers(experts, &self.name))
            }
            (Matmul::Expert(_), None) => Vec::new(),
        };
        let factors = match matmul {
            Matmul::Projection(kind) => self.scales.factors(&self.shape, kind, &plans),
            Matmul::Expert(_) => Factors::default(),
        };
        Some(Projected {
            matmul,
            plans,
            factors,
        })
    }

    /// Returns true if the outputs of a matmul are added to the hidden states. Those of a mixture
    /// are, once all of its matmuls have run.
    fn is_residual(&self, kind: ProjectionKind) -> bool {
        match kind {
            ProjectionKind::Down => self.shape.experts().is_none(),
            _ => kind.is_residual(),
        }
    }

    /// Passes the float hidden states through a float matmul whose outputs are added to them.
    fn pass_float(&mut self, matmul: Matmul) -> Result<(), ModelError> {
        match matmul {
            Matmul::Projection(kind) if self.is_residual(kind) => {
                self.walk.pass_float(&self.name, kind, &self.float)
            }
            _ => Ok(()),
        }
    }

    /// Adds the outputs of a mixture to the hidden states, after all of its matmuls.
    fn pass_mixture(&mut self) -> Result<(), ModelError> {
        if self.shape.experts().is_none() {
            return Ok(());
        }
        self.walk.flush(&self.name)?;
        let kind = ProjectionKind::Down;
        self.walk.pass_float(&self.name, kind, &self.float)?;
        self.walk.pending = Some((kind, self.quantized.clone()));
        Ok(())
    }

    /// Puts one float matmul in the place of a projection, for inputs that are not scaled. `weight`
    /// [K, N] has the values of the quantised weights, multiplied by the factors.
    fn put(&mut self, projected: &Projected<'_>, weight: Tensor<2>) -> Result<(), ModelError> {
        let weight = projected.factors.divide(weight);
        let kind = match projected.matmul {
            Matmul::Projection(kind) => kind,
            Matmul::Expert(matmul) => {
                // The hidden states pass the attention before its experts are replaced.
                self.walk.flush(&self.name)?;
                matmul.replace(&mut self.quantized, weight.cast(self.walk.dtype));
                return Ok(());
            }
        };
        let bias = dense(kind, &self.float).and_then(|linear| linear.bias.clone());
        let projection = Projection::Dense(Linear {
            weight: loaded(weight.cast(self.walk.dtype)),
            bias,
        });
        self.quantized.group_mut(kind).replace(projection);
        // Outputs that are not added to the hidden states leave them as they are.
        if self.is_residual(kind) {
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
        let Projected { matmul, plans, .. } = projected;
        let dtype = self.walk.dtype;
        let is_exact =
            |plan: &&Plan<'_>| dtype == FloatDType::F32 || dtype == float_dtype(plan.view.dtype());
        let weight = match matmul {
            Matmul::Projection(kind) => dense(*kind, &self.float).map(|linear| linear.weight.val()),
            Matmul::Expert(matmul) => matmul.weight(&self.float),
        };
        match weight.filter(|_| plans.iter().all(is_exact)) {
            Some(weight) => Ok(weight.cast(FloatDType::F32)),
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
                // Of an expert without inputs, nothing else says how many tokens there were.
                let tokens = match projected.matmul {
                    Matmul::Expert(_) if self.walk.quantizer.needs_calibration() => 0,
                    _ => self.walk.tokens(),
                };
                let scales = match projected.matmul {
                    Matmul::Projection(kind) => self.scales.has(kind),
                    Matmul::Expert(_) => false,
                };
                return Ok(Some(LayerGroup {
                    layers,
                    tokens,
                    sums: None,
                    scales: scales.then(|| projected.factors.rows().to_vec()),
                    handle: projected,
                }));
            }
            self.pass_float(projected.matmul)?;
            let weight = self.float_weight(&projected)?;
            self.put(&projected, weight)?;
        }
        self.pass_mixture()?;
        Ok(None)
    }

    /// Visits the inputs of the layers, and propagates the float hidden states through the float
    /// projection.
    fn visit_inputs(
        &mut self,
        group: &LayerGroup<Projected<'a>>,
        visit: &mut dyn FnMut(LayerInputs) -> Result<(), LayerError>,
    ) -> Result<(), ModelError> {
        let first = group.name();
        let kind = match group.handle.matmul {
            Matmul::Projection(kind) => kind,
            Matmul::Expert(matmul) => {
                let blocks = [&self.quantized, &self.float];
                if self.chosen.is_none() {
                    self.chosen = Some(self.walk.chosen(first, &self.quantized)?);
                }
                let chosen = self.chosen.get_or_insert_default();
                return self.walk.visit_expert(first, matmul, blocks, chosen, visit);
            }
        };
        let is_residual = self.is_residual(kind);
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
            if !is_residual {
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
        // The float outputs of a mixture are computed after all of its matmuls.
        if let Matmul::Projection(kind) = projected.matmul
            && self.shape.experts().is_none()
        {
            release_before(kind, &mut self.float, &self.quantized);
        }
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
