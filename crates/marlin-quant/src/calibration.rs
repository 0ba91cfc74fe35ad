//! The calibration of a model's linear layers, one group of layers after the other.

#[cfg(test)]
mod tests;

use std::ops::Range;

use burn::tensor::{Tensor, s};
use marlin_format::{PlainWeight, QuantSpec};

use crate::{HessianSums, LayerLoss, QuantError, Quantizer};

/// A model, or a block of one, whose linear layers [`calibrate`] quantises in the order in which
/// they run.
///
/// A runner holds the activations of all calibration batches. It stops before each group of layers
/// with the same inputs, and goes on with their quantised weights.
pub trait BlockRunner {
    /// The data by which the runner finds the layers of a group.
    type Handle;

    /// The error of the runner, which also includes those of the quantiser.
    type Error: From<LayerError>;

    /// Runs the model up to the next layers that are to be quantised. Returns `None` if none are
    /// left.
    ///
    /// # Errors
    /// Returns an error if the model cannot run.
    fn next_layers(&mut self) -> Result<Option<LayerGroup<Self::Handle>>, Self::Error>;

    /// Calls `visit` with the inputs of the layers, batch after batch. The inputs that
    /// [`LayerGroup::sums`] includes are left out.
    ///
    /// # Errors
    /// The errors of `visit`, and an error if the model cannot run.
    fn visit_inputs(
        &mut self,
        group: &LayerGroup<Self::Handle>,
        visit: &mut dyn FnMut(LayerInputs) -> Result<(), LayerError>,
    ) -> Result<(), Self::Error>;

    /// Returns the float weights of the layers side by side, [K, N] in f32, multiplied by
    /// [`LayerGroup::scales`]. Called after [`visit_inputs`](Self::visit_inputs).
    ///
    /// # Errors
    /// Returns an error if a weight cannot be read.
    fn weight(&mut self, group: &LayerGroup<Self::Handle>) -> Result<Tensor<2>, Self::Error>;

    /// Puts quantised weights in the place of the float weights. `values` [K, N] is the weight that
    /// [`weight`](Self::weight) returned, with quantised values in the columns of all layers.
    /// `layers` has the weight and the loss of each layer.
    ///
    /// # Errors
    /// Returns an error if the model cannot run.
    fn replace(
        &mut self,
        group: LayerGroup<Self::Handle>,
        values: Tensor<2>,
        layers: Vec<CalibratedLayer>,
    ) -> Result<(), Self::Error>;

    /// Takes the second moments of the layers' inputs before the layers are replaced. A runner may
    /// keep them as the [`LayerGroup::sums`] of later layers with the same inputs. By default they
    /// are dropped.
    fn keep_sums(&mut self, group: &LayerGroup<Self::Handle>, sums: HessianSums) {
        let _ = group;
        drop(sums);
    }
}

/// Linear layers with the same inputs, whose weights are the columns of one weight [K, N].
#[derive(Debug, Clone)]
pub struct LayerGroup<H> {
    /// The layers, in the order in which they are reported. Columns of no layer keep their float
    /// values.
    pub layers: Vec<GroupLayer>,
    /// The number of calibration tokens, for a quantiser that needs no second moments and for
    /// layers without inputs.
    pub tokens: usize,
    /// The second moments of inputs that the runner has summed before; `None` if there are none.
    pub sums: Option<HessianSums>,
    /// The factors `[K]` by which the rows of the weight are multiplied. The second moments are
    /// those of inputs divided by these factors.
    pub scales: Option<Vec<f32>>,
    /// The data by which the runner finds the layers.
    pub handle: H,
}

/// A linear layer of a [`LayerGroup`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLayer {
    /// The name of the layer.
    pub name: String,
    /// The spec of the quantised weight.
    pub spec: QuantSpec,
    /// The columns of the group's weight that are the layer's weight.
    pub columns: Range<usize>,
}

/// The inputs of a group of layers in one batch.
#[derive(Debug, Clone)]
pub struct LayerInputs {
    /// The inputs [tokens, K] in the quantised model.
    pub quantized: Tensor<2>,
    /// The activations of the float model for the same tokens; `None` in every batch or in none.
    pub float: Option<FloatActivations>,
}

/// The activations of the float model that a group of layers is calibrated with.
#[derive(Debug, Clone)]
pub enum FloatActivations {
    /// The inputs [tokens, K] of the layers, as for [`HessianSums::add_beside`].
    Inputs(Tensor<2>),
    /// The residual [tokens, N] of the layers, as for [`HessianSums::add_with_residual`].
    Residual(Tensor<2>),
}

/// A layer that [`calibrate`] has quantised.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibratedLayer {
    /// The quantised weight.
    pub weight: PlainWeight,
    /// The loss of the layer.
    pub loss: LayerLoss,
}

/// The error of a layer that cannot be quantised.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{layer} cannot be quantised")]
pub struct LayerError {
    /// The name of the layer; the name of the first layer if several have the same inputs.
    pub layer: String,
    /// The cause.
    pub source: QuantError,
}

/// Quantises the layers of a model in the order in which they run. Each group of layers is
/// quantised with the second moments of its inputs, which come from the quantised layers before it.
///
/// `on_layer` is called for each layer after its group is quantised, and before the group is
/// replaced. An error of `on_layer` ends the calibration.
///
/// # Errors
/// The errors of the runner and of `on_layer`; a [`LayerError`] for a layer that the quantiser
/// refuses.
pub fn calibrate<R: BlockRunner>(
    runner: &mut R,
    quantizer: &dyn Quantizer,
    mut on_layer: impl FnMut(&LayerLoss) -> Result<(), R::Error>,
) -> Result<(), R::Error> {
    while let Some(mut group) = runner.next_layers()? {
        let sums = if quantizer.needs_calibration() {
            sum_inputs(runner, &mut group)?
        } else {
            None
        };
        let weight = runner.weight(&group)?;
        let (values, layers) = group.quantize(weight, quantizer, sums.as_ref())?;
        for layer in &layers {
            on_layer(&layer.loss)?;
        }
        if let Some(sums) = sums {
            runner.keep_sums(&group, sums);
        }
        runner.replace(group, values, layers)?;
    }
    Ok(())
}

/// Returns the second moments of a group's inputs; `None` for layers without inputs.
fn sum_inputs<R: BlockRunner>(
    runner: &mut R,
    group: &mut LayerGroup<R::Handle>,
) -> Result<Option<HessianSums>, R::Error> {
    let mut sums = group.sums.take();
    runner.visit_inputs(group, &mut |inputs| {
        let failed = |source| LayerError::new(group.name(), source);
        inputs.add_to(&mut sums).map_err(failed)
    })?;
    Ok(match &group.scales {
        Some(scales) => sums.map(|sums| sums.divided(scales)),
        None => sums,
    })
}

impl<H> LayerGroup<H> {
    /// Returns the name of the first layer, by which errors name the group.
    pub fn name(&self) -> &str {
        self.layers.first().map_or("", |layer| &layer.name)
    }

    /// Quantises the layers. Returns the weight with the quantised values of all layers, and the
    /// layers.
    fn quantize(
        &self,
        mut weight: Tensor<2>,
        quantizer: &dyn Quantizer,
        sums: Option<&HessianSums>,
    ) -> Result<(Tensor<2>, Vec<CalibratedLayer>), LayerError> {
        let tokens = sums.map_or(self.tokens, HessianSums::tokens);
        let n = weight.dims()[1];
        let mut rest: Vec<&GroupLayer> = self.layers.iter().collect();
        let mut found = Vec::with_capacity(rest.len());
        while let [&GroupLayer { spec, .. }, ..] = rest[..] {
            let layers: Vec<&GroupLayer> =
                rest.extract_if(.., |layer| layer.spec == spec).collect();
            // Parts that are the whole weight are not copied.
            if are_columns(&layers, n) {
                weight = quantize_joint(&layers, weight, tokens, quantizer, sums, &mut found)?;
                continue;
            }
            let parts = layers
                .iter()
                .map(|layer| weight.clone().slice(s![.., layer.columns.clone()]));
            let parts = Tensor::cat(parts.collect(), 1);
            let values = quantize_joint(&layers, parts, tokens, quantizer, sums, &mut found)?;
            for (layer, columns) in side_by_side(&layers) {
                weight = weight.slice_assign(
                    s![.., layer.columns.clone()],
                    values.clone().slice(s![.., columns]),
                );
            }
        }
        Ok((weight, found))
    }
}

/// Quantises layers of one spec, whose weights are side by side in `weight` [K, N], and adds them
/// to `found`. Returns the quantised values.
fn quantize_joint(
    layers: &[&GroupLayer],
    weight: Tensor<2>,
    tokens: usize,
    quantizer: &dyn Quantizer,
    sums: Option<&HessianSums>,
    found: &mut Vec<CalibratedLayer>,
) -> Result<Tensor<2>, LayerError> {
    // Columns are independent of each other: one factorisation serves them all.
    let GroupLayer { name, spec, .. } = layers[0];
    let (joint, values) = quantizer
        .quantize_on_device(weight, sums, spec)
        .map_err(|source| LayerError::new(name, source))?;
    for (GroupLayer { name, .. }, columns) in side_by_side(layers) {
        let weight = joint
            .weight
            .slice_n(columns.clone())
            .map_err(|source| LayerError::new(name, source.into()))?;
        let loss = LayerLoss::new(name, tokens, &joint, columns);
        found.push(CalibratedLayer { weight, loss });
    }
    Ok(values)
}

/// Returns true if the columns of the layers are all `n` columns, in order.
fn are_columns(layers: &[&GroupLayer], n: usize) -> bool {
    side_by_side(layers).all(|(layer, columns)| layer.columns == columns)
        && layers
            .iter()
            .map(|layer| layer.columns.len())
            .sum::<usize>()
            == n
}

/// Returns the columns of each layer in a weight that has the weights of these layers side by side.
fn side_by_side<'l>(
    layers: &[&'l GroupLayer],
) -> impl Iterator<Item = (&'l GroupLayer, Range<usize>)> {
    layers.iter().scan(0, |end, layer| {
        let start = *end;
        *end += layer.columns.len();
        Some((*layer, start..*end))
    })
}

impl LayerInputs {
    /// Adds the inputs to second moments, which are created for the first inputs.
    ///
    /// # Errors
    /// The errors of [`HessianSums::add`].
    pub(crate) fn add_to(self, sums: &mut Option<HessianSums>) -> Result<(), QuantError> {
        let Self { quantized, float } = self;
        let empty = || HessianSums::new(quantized.dims()[1], &quantized.device());
        let sums = sums.get_or_insert_with(empty);
        match float {
            None => sums.add(quantized),
            Some(FloatActivations::Inputs(float)) => sums.add_beside(quantized, float),
            Some(FloatActivations::Residual(residual)) => {
                sums.add_with_residual(quantized, residual)
            }
        }
    }
}

impl LayerError {
    /// Creates the error of a layer.
    pub(crate) fn new(layer: &str, source: QuantError) -> Self {
        Self {
            layer: layer.into(),
            source,
        }
    }
}
