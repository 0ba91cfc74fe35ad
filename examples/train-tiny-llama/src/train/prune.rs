//! A model whose projections are pruned to 2:4, and trained on with the mask held.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use marlin_format::prune_two_four;
use marlin_llama::{LlamaModel, Projection};

use crate::error::Error;

/// For each pruned weight [K, N] a mask: 1 where a value stays, 0 where it was pruned.
pub struct Masks(HashMap<ParamId, Tensor<2>>);

/// Prunes the projections of a model by magnitude and makes it trainable; embedding, norms and head stay as they are.
///
/// A weight that is 2:4 keeps its values, so that a training can go on from its own result.
pub fn prune(model: LlamaModel) -> Result<(LlamaModel, Masks), Error> {
    let weight_of = |(name, projection): (String, &Projection)| match projection {
        Projection::Dense(linear) if name != "lm_head" => Some(linear.weight.id),
        _ => None,
    };
    let weights = model.projections().filter_map(weight_of).collect();
    let mut prune = Prune { weights, masks: HashMap::new(), failed: None };
    let model = model.map(&mut prune);
    match prune.failed {
        None => Ok((Module::train(model).map(&mut Tracked), Masks(prune.masks))),
        Some(error) => Err(error),
    }
}

/// Makes every parameter one that gradients are computed of: those of an opened model are not.
struct Tracked;

impl ModuleMapper for Tracked {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.set_require_grad(true)
    }
}

struct Prune {
    weights: HashSet<ParamId>,
    masks: HashMap<ParamId, Tensor<2>>,
    failed: Option<Error>,
}

impl Prune {
    /// The weight without the values that are pruned.
    fn pruned(&mut self, id: ParamId, weight: Tensor<2>) -> Result<Tensor<2>, Error> {
        let ([k, n], device) = (weight.dims(), weight.device());
        let mut values = weight.try_into_vec_as::<f32>().map_err(|error| Error::Device(error.to_string()))?;
        prune_two_four(&mut values, k, n).map_err(|error| Error::Option(format!("--sparse24: {error}")))?;
        let weight = Tensor::from_data(TensorData::new(values, [k, n]), &device);
        self.masks.insert(id, weight.clone().not_equal_elem(0.0).float());
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
    /// The gradients without those of pruned values. AdamW leaves a value of 0 without a gradient as it is, and its decay does, too.
    pub fn apply<M: Module>(&self, model: &M, grads: GradientsParams) -> GradientsParams {
        let mut masked = Masked { masks: &self.0, grads };
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
        let Some(mask) = self.masks.get(&param.id) else { return };
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            let shape = grad.dims();
            self.grads.register(param.id, grad * mask.clone().reshape(shape));
        }
    }
}
