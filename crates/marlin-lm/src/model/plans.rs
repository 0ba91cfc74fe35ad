use burn_marlin::ActivationDtype;
use burn_marlin::backend::activation_dtype;
use burn_marlin::device::target;
use marlin_kernels::{Epilogue, FloatProblem, Plan, Problem, Prologue, plan};
use marlin_nn::CacheShape;
use marlin_nn::ahead::{LinearShape, LinearWeight, PassShape};
use marlin_nn::kernels::attention::AttentionPass;

use super::products::Product;
use super::{Block, Model, Projection};

/// A matmul of a model and its plan.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerPlan {
    /// The layer's name in a checkpoint; `lm_head` for the head, even if its weight is the
    /// embedding.
    pub layer: String,
    /// The matmul.
    pub problem: Problem,
    /// The chosen kernel, and the reason for the choice.
    pub plan: Plan,
}

impl Model {
    /// Returns the plans of all matmuls with weights in a decode step of `rows` rows, in the order
    /// in which the matmuls run.
    ///
    /// A prefill of `rows` tokens has the same plans for its layers, but the head runs only on the
    /// last tokens of prompts.
    pub fn plans(&self, rows: usize) -> Vec<LayerPlan> {
        let dtype = activation_dtype(self.dtype().into()).unwrap_or(ActivationDtype::F32);
        let target = target(&self.device());
        let float = |[k, n]: [usize; 2]| {
            let problem = FloatProblem {
                m: rows,
                k,
                n,
                dtype,
            };
            (problem.into(), plan(problem, &target))
        };
        let layer_plan = |product: Product<'_>| {
            let (problem, plan) = match product.projection {
                Projection::Quant(linear) => {
                    let problem = linear
                        .weight()
                        .problem(rows, dtype)
                        .with_prologue(product.prologue)
                        .with_epilogue(product.epilogue);
                    (problem.into(), plan(problem, &target))
                }
                Projection::Dense(_) => float(product.projection.dims()),
            };
            LayerPlan {
                layer: product.name,
                problem,
                plan,
            }
        };
        let head = match &self.lm_head {
            Some(head) => layer_plan(Product::plain("lm_head", head)),
            None => {
                let (problem, plan) = float([self.config.hidden_size, self.config.vocab_size]);
                LayerPlan {
                    layer: "lm_head".into(),
                    problem,
                    plan,
                }
            }
        };
        self.layer_products()
            .map(layer_plan)
            .chain([head])
            .collect()
    }

    /// What the kernels of a pass depend on: of `rows` rows, `last_rows` of which have logits, with
    /// a cache of this shape. Equal layers come once.
    pub(crate) fn pass_shape(
        &self,
        pass: AttentionPass,
        rows: usize,
        last_rows: usize,
        cache: CacheShape,
    ) -> PassShape {
        let dtype = activation_dtype(self.dtype().into()).unwrap_or(ActivationDtype::F32);
        let (mut attention, mut layers) = (Vec::new(), Vec::new());
        for of_block in self.layers.iter().map(Block::attention) {
            let shape = of_block.parts(&self.rope).shape(pass, rows, cache, dtype);
            push_new(&mut attention, shape);
        }
        self.layer_products()
            .for_each(|product| push_new(&mut layers, linear_shape(&product)));
        let head = match &self.lm_head {
            Some(head) => linear_shape(&Product::plain("lm_head", head)),
            None => LinearShape {
                weight: LinearWeight::Float([self.config.hidden_size, self.config.vocab_size]),
                bias: false,
                prologue: Prologue::None,
                epilogue: Epilogue::None,
            },
        };
        PassShape {
            attention,
            last_rows,
            layers,
            head,
        }
    }
}

fn linear_shape(product: &Product<'_>) -> LinearShape {
    let (weight, bias) = match product.projection {
        Projection::Dense(linear) => (
            LinearWeight::Float(product.projection.dims()),
            linear.bias.is_some(),
        ),
        Projection::Quant(linear) => (
            LinearWeight::Quantized(linear.weight().descriptor()),
            linear.has_bias(),
        ),
    };
    LinearShape {
        weight,
        bias,
        prologue: product.prologue,
        epilogue: product.epilogue,
    }
}

fn push_new<T: PartialEq>(values: &mut Vec<T>, value: T) {
    if !values.contains(&value) {
        values.push(value);
    }
}
