//! AWQ (arXiv 2306.00978) during calibration: the scales of a block's inputs, and the tensors that
//! are divided by the scales. These tensors are the norm, or the last output features of the
//! projection, that the inputs come from.
//!
//! The model that runs on the samples is not scaled. Scaled are the weights that the quantiser
//! gets, the sums of their inputs, and the tensors that are written.

use burn::tensor::{DType, Device, Tensor, TensorData};
use marlin_format::checkpoint::{
    Checkpoint, Dtype, TensorData as FileTensor, TensorSpec, TensorView,
};
use marlin_quant::{HessianSums, awq_scales};

use super::plan::{Plan, Target};
use super::refused;
use super::walk::{CalibrationWalk, rows, side_by_side};
use crate::ModelError;
use crate::architectures::{BlockShape, Input, ProjectionKind, ProjectionShape};
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

    /// Returns true if the inputs of a projection are scaled.
    pub(super) fn has(&self, kind: ProjectionKind) -> bool {
        self.of(kind).is_some()
    }

    /// Reads the scales of a block that an earlier run has quantised.
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

    /// Returns the factors of the layers of a projection, side by side.
    pub(super) fn factors(
        &self,
        shape: &BlockShape,
        kind: ProjectionKind,
        plans: &[&Plan<'_>],
    ) -> Factors {
        let (projection, scales) = (shape.projection(kind), self.of(kind));
        let rows = projection.map_or_else(Vec::new, |projection| {
            let row =
                |feature| scales.map_or(1.0, |scales| scales[projection.input.channel(feature)]);
            (0..projection.k).map(row).collect()
        });
        let mut columns = vec![1.0; plans.iter().map(|plan| plan.n()).sum()];
        let taker = shape
            .projections()
            .find(|taker| taker.input.projection() == Some(kind));
        divide_last(
            &mut columns,
            taker.and_then(|taker| self.of(taker.kind)).unwrap_or(&[]),
        );
        Factors { rows, columns }
    }
}

/// Returns the name of a projection's scales in the folder of a completed block.
fn tensor_name(block: &str, kind: ProjectionKind) -> String {
    format!("{block}.awq_scales.{kind:?}")
}

/// Returns the name of a norm's weight.
fn norm_name(block: &str, norm: &str) -> String {
    format!("{block}.{norm}.weight")
}

/// Divides the last elements of `values` by `scales`.
fn divide_last(values: &mut [f32], scales: &[f32]) {
    values
        .iter_mut()
        .rev()
        .zip(scales.iter().rev())
        .for_each(|(value, scale)| *value /= scale);
}

/// The factors of the rows and of the columns of a projection's weights [K, N]; none if all are 1.
#[derive(Default)]
pub(super) struct Factors {
    rows: Vec<f32>,
    columns: Vec<f32>,
}

impl Factors {
    /// Returns the scales of the input features, `[K]`.
    pub(super) fn rows(&self) -> &[f32] {
        &self.rows
    }

    /// Multiplies weights [K, N] in f32 by the factors.
    pub(super) fn multiply(&self, weight: Tensor<2>) -> Tensor<2> {
        match self.products(&weight.device()) {
            Some(products) => weight * products,
            None => weight,
        }
    }

    /// Divides weights [K, N] in f32 by the factors.
    pub(super) fn divide(&self, weight: Tensor<2>) -> Tensor<2> {
        match self.products(&weight.device()) {
            Some(products) => weight / products,
            None => weight,
        }
    }

    /// Returns the factors of all elements, [K, N]; `None` if all factors are 1.
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
    /// Computes the scales of a block, for the inputs that its float layers get from the quantised
    /// blocks before it. A projection has no scales if one of its layers is skipped, or if its
    /// inputs come from a skipped layer.
    pub(super) fn scales(
        &mut self,
        block: &str,
        shape: &BlockShape,
        layer: &Block,
    ) -> Result<Scales, ModelError> {
        let mut scales = Scales::default();
        let is_quantized = |plan: &&Plan<'_>| matches!(plan.target, Target::Quantize(_));
        for projection in shape.projections() {
            let plans = self.plans_of(block, shape, projection.kind);
            let takes = match projection.input.projection() {
                // The router of a mixture takes the same norm's outputs, and stays as it is.
                None => projection.input == Input::MixerNorm || shape.experts().is_none(),
                Some(origin) => self
                    .plans_of(block, shape, origin)
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

    /// Searches for the scales of a projection of a block, with the spec of its first layer.
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

    /// Returns the scales of a block, and the norms and biases that are divided by the scales, each
    /// in its own dtype.
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
                    .and_then(|origin| self.plans_of(block, shape, origin).pop())
                    .map(|plan| format!("{}.bias", plan.source())),
            };
            // The projection may have no bias.
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

    /// Returns a tensor of the source by name.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.plans
            .iter()
            .map(|plan| plan.view)
            .find(|view| view.name() == name)
    }
}

/// Changes the scales of a norm's channels so that the norm's weight divided by the scale is exact
/// in the norm's dtype. A channel has the scale 1 if the rounded quotient is 0 or not finite.
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
