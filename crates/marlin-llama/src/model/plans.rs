use burn::nn::Linear;
use burn::tensor::FloatDType;
use burn_marlin::ActivationDtype;
use burn_marlin::device::target;
use marlin_kernels::{FloatProblem, Kernel, Plan, Problem, PrologueStage, Reason, plan};

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
    /// A prompt of `rows` tokens has the same plans for its layers and runs no head: the step that takes its last token does.
    pub fn plans(&self, rows: usize) -> Vec<LayerPlan> {
        let dtype = self.activations();
        let target = target(&self.device());
        let float = |[k, n]: [usize; 2]| FloatProblem { m: rows, k, n, dtype };
        let head = |dims| LayerPlan { layer: "lm_head".into(), problem: float(dims).into(), plan: plan(float(dims), &target) };
        let layers = self.products().map(|product| match product.projection {
            Projection::Quant(linear) => {
                let problem = linear.weight().problem(rows, dtype).with_prologue(product.prologue);
                LayerPlan { layer: product.name, problem: problem.into(), plan: plan(problem, &target) }
            }
            // As `decode_head` takes it.
            Projection::Dense(Linear { bias: None, .. }) if product.is_head => head(product.projection.dims()),
            Projection::Dense(_) => {
                let plan = Plan { kernel: Kernel::FloatMatmul, prologue: PrologueStage::None, reason: Reason::FloatWeight };
                LayerPlan { layer: product.name, problem: float(product.projection.dims()).into(), plan }
            }
        });
        let mut plans: Vec<LayerPlan> = layers.collect();
        if self.lm_head.is_none() {
            let [vocab, hidden] = self.embed_tokens.weight.shape().dims();
            plans.push(head([hidden, vocab]));
        }
        plans
    }

    /// The kernels' name of [`dtype`](Self::dtype).
    fn activations(&self) -> ActivationDtype {
        match self.dtype() {
            FloatDType::F16 => ActivationDtype::F16,
            FloatDType::BF16 => ActivationDtype::BF16,
            _ => ActivationDtype::F32,
        }
    }
}
