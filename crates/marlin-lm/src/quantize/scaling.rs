//! AWQ (arXiv 2306.00978) in the walk: the scales of a block's inputs, and what takes their
//! reciprocals: the norm or the last output features of the projection that the inputs come from.
//!
//! The model that walks stays as it is: scaled are the weights that the quantiser gets, the sums of
//! their inputs, and what is written.

use burn::tensor::{DType, Device, Tensor, TensorData};
use marlin_format::checkpoint::{
    Checkpoint, Dtype, TensorData as FileTensor, TensorSpec, TensorView,
};
use marlin_quant::{HessianSums, awq_scales};

use super::plan::{Plan, Target};
use super::refused;
use super::walk::{CalibrationWalk, rows, side_by_side};
use crate::ModelError;
use crate::architectures::{BlockShape, ProjectionKind, ProjectionShape};
use crate::folder::float_dtype;
use crate::model::Block;
use crate::save::{bytes, rounded};

/// The scales of a block, by [`ProjectionKind`]: one for each channel that its inputs come from,
/// none where they are not scaled. What they come from is divided by them, and the rows of its
/// weights are multiplied.
#[derive(Default)]
pub(super) struct Scales([Option<Vec<f32>>; 4]);

impl Scales {
    fn of(&self, kind: ProjectionKind) -> Option<&[f32]> {
        self.0[kind as usize].as_deref()
    }

    /// True if the inputs of a projection are scaled.
    pub(super) fn has(&self, kind: ProjectionKind) -> bool {
        self.of(kind).is_some()
    }

    /// Those of a block that an earlier run has quantised.
    pub(super) fn read(checkpoint: &Checkpoint, block: &str) -> Result<Self, ModelError> {
        let mut scales = Self::default();
        for kind in ProjectionKind::ALL {
            let name = tensor_name(block, kind);
            if checkpoint.contains(&name) {
                scales.0[kind as usize] = Some(checkpoint.tensor(&name)?.to_f32()?);
            }
        }
        Ok(scales)
    }

    /// The factors of the layers of a projection, side by side.
    pub(super) fn factors(
        &self,
        shape: &BlockShape,
        kind: ProjectionKind,
        plans: &[&Plan<'_>],
    ) -> Factors {
        let (projection, scales) = (shape.projection(kind), self.of(kind));
        let row = |feature| scales.map_or(1.0, |scales| scales[projection.input.channel(feature)]);
        let rows = (0..projection.k).map(row).collect();
        let mut columns = vec![1.0; plans.iter().map(|plan| plan.n()).sum()];
        let taker = shape
            .projections()
            .into_iter()
            .find(|taker| taker.input.projection() == Some(kind));
        divide_last(
            &mut columns,
            taker.and_then(|taker| self.of(taker.kind)).unwrap_or(&[]),
        );
        Factors { rows, columns }
    }
}

/// The name of a projection's scales in the folder of a block that is done.
fn tensor_name(block: &str, kind: ProjectionKind) -> String {
    format!("{block}.awq_scales.{kind:?}")
}

/// The name of a norm's weight.
fn norm_name(block: &str, norm: &str) -> String {
    format!("{block}.{norm}.weight")
}

/// Divides the last of `values` by `scales`.
fn divide_last(values: &mut [f32], scales: &[f32]) {
    values
        .iter_mut()
        .rev()
        .zip(scales.iter().rev())
        .for_each(|(value, scale)| *value /= scale);
}

/// What the weights [K, N] of a projection are multiplied by: each row, and each column.
pub(super) struct Factors {
    rows: Vec<f32>,
    columns: Vec<f32>,
}

impl Factors {
    /// The scales of the input features, `[K]`.
    pub(super) fn rows(&self) -> &[f32] {
        &self.rows
    }

    /// Scales weights in f32.
    pub(super) fn multiply(&self, weight: Tensor<2>) -> Tensor<2> {
        match self.products(&weight.device()) {
            Some(products) => weight * products,
            None => weight,
        }
    }

    /// Takes the scales from weights in f32.
    pub(super) fn divide(&self, weight: Tensor<2>) -> Tensor<2> {
        match self.products(&weight.device()) {
            Some(products) => weight / products,
            None => weight,
        }
    }

    /// Those of all elements, [K, N]. None if nothing is scaled.
    fn products(&self, device: &Device) -> Option<Tensor<2>> {
        if self
            .rows
            .iter()
            .chain(&self.columns)
            .all(|&factor| factor == 1.0)
        {
            return None;
        }
        let to_device = |values: &[f32], shape: [usize; 2]| {
            Tensor::<2>::from_data(
                TensorData::new(values.to_vec(), shape),
                (device, DType::F32),
            )
        };
        Some(
            to_device(&self.rows, [self.rows.len(), 1])
                * to_device(&self.columns, [1, self.columns.len()]),
        )
    }
}

impl CalibrationWalk<'_> {
    /// The scales of a block, for the inputs that its float layers get from the quantised blocks
    /// before. Projections that have a float layer, or whose inputs come from one, have none.
    pub(super) fn scales(
        &mut self,
        block: &str,
        shape: &BlockShape,
        layer: &Block,
    ) -> Result<Scales, ModelError> {
        let mut scales = Scales::default();
        let is_quantized = |plan: &&Plan<'_>| matches!(plan.target, Target::Quantize(_));
        for projection in shape.projections() {
            let plans = self.plans_of(block, projection);
            let takes = match projection.input.projection() {
                None => true,
                Some(origin) => self
                    .plans_of(block, shape.projection(origin))
                    .last()
                    .is_some_and(is_quantized),
            };
            if takes && !plans.is_empty() && plans.iter().all(is_quantized) {
                scales.0[projection.kind as usize] =
                    Some(self.search(block, shape, projection, &plans, layer)?);
            }
        }
        Ok(scales)
    }

    /// The scales of a projection of a block, as the spec of its first layer has them.
    fn search(
        &mut self,
        block: &str,
        shape: &BlockShape,
        projection: &ProjectionShape,
        plans: &[&Plan<'_>],
        layer: &Block,
    ) -> Result<Vec<f32>, ModelError> {
        let failed = |error| refused(plans[0].source(), error);
        let (kind, input) = (projection.kind, projection.input);
        let channels: Vec<usize> = (0..projection.k)
            .map(|feature| input.channel(feature))
            .collect();
        let mut sums = HessianSums::new(channels.len(), self.device);
        self.for_each_batch(plans[0].source(), |walk, index, mut hidden| {
            let of_batch = walk.batches[index].rows.as_ref();
            if matches!(kind, ProjectionKind::GateUp | ProjectionKind::Down) {
                // Attention once more for each projection of the MLP: the hidden states after it
                // would take as much memory as those before.
                hidden =
                    hidden.clone() + walk.outputs(ProjectionKind::Output, layer, &hidden, of_batch);
            }
            sums.add(rows(walk.inputs(kind, layer, &hidden, of_batch)))
                .map_err(failed)
        })?;
        let weights = plans
            .iter()
            .map(|plan| plan.weight())
            .collect::<Result<Vec<_>, _>>()?;
        let n = plans.iter().map(|plan| plan.n()).sum();
        let mut scales = awq_scales(
            &side_by_side(channels.len(), weights),
            n,
            &sums,
            &channels,
            &plans[0].spec,
        )
        .map_err(failed)?;
        if let Some(name) = shape.norm(input)
            && let Some(norm) = self.tensor(&norm_name(block, name))
        {
            round_reciprocals(&mut scales, &norm)?;
        }
        Ok(scales)
    }

    /// The norms and biases of a block that take the reciprocals of its scales, each in its own
    /// dtype, and the scales.
    pub(super) fn scaled_tensors(
        &self,
        block: &str,
        shape: &BlockShape,
        scales: &Scales,
    ) -> Result<Vec<FileTensor>, ModelError> {
        let mut tensors = Vec::new();
        for projection in shape.projections() {
            let kind = projection.kind;
            let Some(scales) = scales.of(kind) else {
                continue;
            };
            let spec = TensorSpec::new(tensor_name(block, kind), Dtype::F32, [scales.len()]);
            tensors.push(FileTensor {
                spec,
                bytes: scales
                    .iter()
                    .flat_map(|scale| scale.to_le_bytes())
                    .collect(),
            });
            let name = match shape.norm(projection.input) {
                Some(name) => Some(norm_name(block, name)),
                None => projection
                    .input
                    .projection()
                    .and_then(|origin| self.plans_of(block, shape.projection(origin)).pop())
                    .map(|plan| format!("{}.bias", plan.source())),
            };
            // There may be no bias.
            let Some(view) = name.and_then(|name| self.tensor(&name)) else {
                continue;
            };
            let mut values = view.to_f32()?;
            divide_last(&mut values, scales);
            let bytes = bytes(view.name(), &values, float_dtype(view.dtype()))?;
            tensors.push(FileTensor {
                spec: TensorSpec::new(view.name(), view.dtype(), view.shape()),
                bytes,
            });
        }
        Ok(tensors)
    }

    /// A tensor of the source.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.plans
            .iter()
            .map(|plan| plan.view)
            .find(|view| view.name() == name)
    }
}

/// Changes the scales of a norm's channels to those whose reciprocals its dtype holds exactly,
/// times its weight. A channel has 1 where it holds none.
fn round_reciprocals(scales: &mut [f32], norm: &TensorView<'_>) -> Result<(), ModelError> {
    let dtype = float_dtype(norm.dtype());
    for (scale, weight) in scales.iter_mut().zip(norm.to_f32()?) {
        let divided = rounded(weight / *scale, dtype);
        *scale = if divided != 0.0 && divided.is_finite() {
            weight / divided
        } else {
            1.0
        };
    }
    Ok(())
}
