//! The traversal that replaces float weights with quantised ones, one layer at a time: the float
//! values of a layer are freed before those of the next layer are read.

use super::report::{Outcome, SkipReason};
use super::{Rules, Weights};
use crate::backend::activation_dtype;
use crate::{Error, QuantizedWeight};
use burn::module::{Param, ParamId, Reparameterizer};
use burn::tensor::Tensor;
use marlin_format::{PlainWeight, QuantSpec, WeightFormat};
use marlin_kernels::ActivationDtype;
use std::collections::{HashMap, HashSet};

/// A reparameteriser that attaches quantised weights to the selected parameters.
pub(super) struct Attach<'a> {
    pub rules: &'a Rules,
    pub weights: Weights,
    /// The function that returns the weight for the layer at a path, or `None` to round the layer.
    pub given: &'a mut dyn FnMut(&str) -> Option<PlainWeight>,
    /// The path of each selected parameter, and its spec if it is already chosen.
    pub selected: HashMap<String, Option<QuantSpec>>,
    /// The ids that several selected parameters have: parameters with the same id may share one
    /// tensor.
    pub shared: HashSet<ParamId>,
    /// The weights made so far for the ids in `shared`, each with its plain form on the host.
    pub made: HashMap<ParamId, Vec<Made>>,
    /// The outcome for each parameter, by path.
    pub outcomes: HashMap<String, Outcome>,
    /// The error of the first layer that failed; later layers are unchanged.
    pub failed: Option<Error>,
}

/// A weight that another parameter with the same id may share.
pub(super) struct Made {
    path: String,
    plain: PlainWeight,
    weight: QuantizedWeight,
}

impl Reparameterizer for &mut Attach<'_> {
    type Reparam = QuantizedWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<QuantizedWeight>) {
        if self.failed.is_some() {
            return (param, None);
        }
        let Some(chosen) = self.selected.remove(path) else {
            return (param, None);
        };
        match self.convert(path, &param, chosen) {
            Ok((outcome, weight)) => {
                self.outcomes.insert(path.to_owned(), outcome);
                let Some(weight) = weight else {
                    return (param, None);
                };
                let (placeholder, weight) = weight.attach(path, &param, param.base().dtype());
                (placeholder, Some(weight))
            }
            Err(error) => {
                self.failed = Some(error);
                (param, None)
            }
        }
    }
}

impl Attach<'_> {
    fn convert<const D: usize>(
        &mut self,
        path: &str,
        param: &Param<Tensor<D>>,
        chosen: Option<QuantSpec>,
    ) -> Result<(Outcome, Option<QuantizedWeight>), Error> {
        let base = param.base();
        let dims = base.dims();
        let (k, n) = (dims[0], dims[D - 1]);
        let spec = match chosen {
            Some(spec) => spec,
            None => match self.rules.spec_of(path, k, n) {
                Ok(spec) => spec,
                Err(error) => return Ok((Outcome::Skipped(SkipReason::Shape { error }), None)),
            },
        };
        let activations = activation_dtype(base.dtype()).unwrap_or(ActivationDtype::F32);
        let (weight, format, shared_with, underflows) = match self.weights {
            Weights::Unloaded => (
                QuantizedWeight::unloaded(k, n, spec, activations, &base.device())?,
                spec.into(),
                None,
                0,
            ),
            Weights::Rounded => self.round(path, param.id, base.reshape([k, n]), &spec)?,
        };
        Ok((
            Outcome::quantized(path, &weight, format, activations, shared_with)
                .with_underflows(underflows),
            Some(weight),
        ))
    }

    /// Rounds a layer. Parameters that share a tensor before the conversion share a weight after
    /// it.
    ///
    /// Returns the weight, the format to which it was rounded (the device may hold another format),
    /// the path of the earlier layer that shares the weight, and the number of groups whose scales
    /// underflow.
    fn round(
        &mut self,
        path: &str,
        id: ParamId,
        weight: Tensor<2>,
        spec: &QuantSpec,
    ) -> Result<(QuantizedWeight, WeightFormat, Option<String>, usize), Error> {
        let (activations, device) = (
            activation_dtype(weight.dtype()).unwrap_or(ActivationDtype::F32),
            weight.device(),
        );
        let (expected, float) = (weight.dims(), weight.clone());
        let plain = match (self.given)(path) {
            Some(plain) if [plain.k(), plain.n()] == expected => plain,
            Some(plain) => {
                return Err(Error::WeightShape {
                    path: path.to_owned(),
                    expected,
                    found: [plain.k(), plain.n()],
                });
            }
            None => QuantizedWeight::round(weight, spec, self.rules.sparsity)
                .map_err(|error| error.in_layer(path))?,
        };
        let (format, underflows) = (
            plain.descriptor().format,
            plain.underflows(|| QuantizedWeight::values(float))?,
        );
        if !self.shared.contains(&id) {
            return Ok((
                QuantizedWeight::from_owned_plain(plain, activations, &device),
                format,
                None,
                underflows,
            ));
        }
        // Equal ids mean that the parameters once were one tensor; equal values mean that they
        // still are.
        let made = self.made.entry(id).or_default();
        if let Some(made) = made
            .iter()
            .find(|made| made.plain == plain && made.weight.device() == device)
        {
            return Ok((
                made.weight.clone(),
                format,
                Some(made.path.clone()),
                underflows,
            ));
        }
        let weight = QuantizedWeight::from_plain_for(&plain, activations, &device);
        made.push(Made {
            path: path.to_owned(),
            plain,
            weight: weight.clone(),
        });
        Ok((weight, format, None, underflows))
    }
}
