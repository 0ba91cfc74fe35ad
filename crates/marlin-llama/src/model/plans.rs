use burn_marlin::ActivationDtype;
use burn_marlin::backend::activation_dtype;
use burn_marlin::device::target;
use marlin_kernels::{FloatProblem, Plan, Problem, plan};

use super::assemble::Product;
use super::{LlamaModel, Projection};

/// A matmul of a model and its plan.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerPlan {
    /// The layer's name in a checkpoint; `lm_head` for the head, even if its weight is the embedding.
    pub layer: String,
    /// The matmul.
    pub problem: Problem,
    /// The kernel, and why.
    pub plan: Plan,
}

impl LlamaModel {
    /// The plans of all matmuls with weights in a decode step of `rows` rows, in the order in which they run.
    ///
    /// `rows` tokens of prompts have the same plans for their layers; the head runs on the last tokens of prompts alone.
    pub fn plans(&self, rows: usize) -> Vec<LayerPlan> {
        let dtype = activation_dtype(self.dtype().into()).unwrap_or(ActivationDtype::F32);
        let target = target(&self.device());
        let float = |[k, n]: [usize; 2]| {
            let problem = FloatProblem { m: rows, k, n, dtype };
            (problem.into(), plan(problem, &target))
        };
        let layer_plan = |product: Product<'_>| {
            let (problem, plan) = match product.projection {
                Projection::Quant(linear) => {
                    let problem = linear.weight().problem(rows, dtype).with_prologue(product.prologue).with_epilogue(product.epilogue);
                    (problem.into(), plan(problem, &target))
                }
                Projection::Dense(_) => float(product.projection.dims()),
            };
            LayerPlan { layer: product.name, problem, plan }
        };
        let head = match &self.lm_head {
            Some(head) => layer_plan(Product::plain("lm_head", head)),
            None => {
                let (problem, plan) = float([self.config.hidden_size, self.config.vocab_size]);
                LayerPlan { layer: "lm_head".into(), problem, plan }
            }
        };
        self.layer_products().map(layer_plan).chain([head]).collect()
    }
}
