//! A model whose projections are 2:4, or pruned to that, and fine-tuned with a fixed mask.

use std::collections::{HashMap, HashSet};
use std::fmt;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use marlin_format::{check_two_four, prune_two_four};
use marlin_lm::{Model, Projection};

use crate::error::Error;

/// The masks of the projections' weights [K, N]: 0 for a value that stays 0, 1 for any other value.
pub struct Masks {
    masks: HashMap<ParamId, Tensor<2>>,
    pruning: Pruning,
}

/// The extent to which a model was pruned.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pruning {
    /// The number of projections that were not 2:4 and were pruned by magnitude.
    pub by_magnitude: usize,
    /// The number of all projections; those that run as one matmul count as one.
    pub projections: usize,
    /// The number of values of all projections.
    values: usize,
    /// The number of values that are not 0.
    kept: usize,
}

impl fmt::Display for Pruning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            by_magnitude,
            projections,
            values,
            kept,
        } = *self;
        let share = 100.0 * kept as f64 / values.max(1) as f64;
        write!(
            f,
            "{by_magnitude} of {projections} projections pruned by magnitude, the others are 2:4 already; {share:.2} % of the values are not 0"
        )
    }
}

/// Prunes the projections of a float model that are not 2:4 by magnitude, and makes the model
/// trainable. Embedding, norms and lm_head are not changed.
///
/// A weight that is 2:4 keeps its values, so that training can continue from its own result, or
/// from the result of another pruning method.
pub fn prune(model: Model) -> Result<(Model, Masks), Error> {
    let weight_of = |(name, projection): (String, &Projection)| match projection {
        Projection::Dense(linear) if name != "lm_head" => Some(linear.weight.id),
        _ => None,
    };
    let weights = model.projections().filter_map(weight_of).collect();
    let mut prune = Prune {
        weights,
        masks: HashMap::new(),
        pruning: Pruning::default(),
        failed: None,
    };
    let model = model.map(&mut prune);
    match prune.failed {
        None => Ok((
            Module::train(model).map(&mut Tracked),
            Masks {
                masks: prune.masks,
                pruning: prune.pruning,
            },
        )),
        Some(error) => Err(error),
    }
}

/// A mapper that enables gradients for every parameter, because an opened model has none enabled.
struct Tracked;

impl ModuleMapper for Tracked {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.set_require_grad(true)
    }
}

struct Prune {
    weights: HashSet<ParamId>,
    masks: HashMap<ParamId, Tensor<2>>,
    pruning: Pruning,
    failed: Option<Error>,
}

impl Prune {
    /// Returns the weight with pruned values set to 0, and records its mask.
    fn pruned(&mut self, id: ParamId, weight: Tensor<2>) -> Result<Tensor<2>, Error> {
        let ([k, n], device) = (weight.dims(), weight.device());
        let mut values = weight
            .try_into_vec_as::<f32>()
            .map_err(|error| Error::Device(error.to_string()))?;
        self.pruning.by_magnitude += usize::from(check_two_four(&values, k, n).is_err());
        prune_two_four(&mut values, k, n)
            .map_err(|error| Error::Option(format!("--sparse24: {error}")))?;
        self.pruning.projections += 1;
        self.pruning.values += values.len();
        self.pruning.kept += values.iter().filter(|value| **value != 0.0).count();
        let weight = Tensor::from_data(TensorData::new(values, [k, n]), &device);
        self.masks
            .insert(id, weight.clone().not_equal_elem(0.0).float());
        Ok(weight)
    }
}

impl ModuleMapper for Prune {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.weights.contains(&param.id) || self.failed.is_some() {
            return param;
        }
        let (id, shape) = (param.id, param.dims());
        match self.pruned(id, param.val().reshape([shape[0], shape[D - 1]])) {
            Ok(weight) => param.map(|_| weight.reshape(shape)),
            Err(error) => {
                self.failed = Some(error);
                param
            }
        }
    }
}

impl Masks {
    /// Returns the extent to which the model was pruned when the masks were made.
    pub fn pruning(&self) -> Pruning {
        self.pruning
    }

    /// Returns the gradients with those of pruned values set to 0. AdamW and its weight decay keep
    /// a value of 0 whose gradient is always 0.
    pub fn apply<M: Module>(&self, model: &M, grads: GradientsParams) -> GradientsParams {
        let mut masked = Masked {
            masks: &self.masks,
            grads,
        };
        model.visit(&mut masked);
        masked.grads
    }
}

struct Masked<'a> {
    masks: &'a HashMap<ParamId, Tensor<2>>,
    grads: GradientsParams,
}

impl ModuleVisitor for Masked<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(mask) = self.masks.get(&param.id) else {
            return;
        };
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            let shape = grad.dims();
            self.grads
                .register(param.id, grad * mask.clone().reshape(shape));
        }
    }
}
