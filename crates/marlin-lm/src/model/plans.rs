use burn::tensor::FloatDType;
use burn_marlin::ActivationDtype;
use burn_marlin::backend::activation_dtype;
use burn_marlin::device::target;
use marlin_kernels::{Epilogue, FloatProblem, Plan, Problem, Prologue, plan};
use marlin_nn::CacheShape;
use marlin_nn::ahead::{ExpertsShape, LinearShape, LinearWeight, PassShape};
use marlin_nn::kernels::attention::AttentionPass;

use super::products::Product;
use super::{Block, Experts, Mixture, Model, Projection};

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
    /// Returns the plans of all matmuls with weights in a decode step of `rows` rows: those that
    /// all tokens have, routers after them, then those of quantised experts, then the head.
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
        let of_experts = self.layers.iter().enumerate().flat_map(|(index, block)| {
            let shape = self.config.block(index);
            let experts = shape.experts().zip(block.mixture());
            experts.map_or_else(Vec::new, |(shape, mixture)| {
                let name = format!("model.layers.{index}.{}", shape.name);
                expert_plans(&name, mixture, rows, self.dtype())
            })
        });
        self.layer_products()
            .map(layer_plan)
            .chain(of_experts)
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
        let mut experts = Vec::new();
        let mixtures = self.layers.iter().filter_map(Block::mixture);
        for mixture in mixtures {
            if let Experts::Quant(of_mixture) = &mixture.experts
                && of_mixture.has_kernels(&self.device(), self.dtype())
            {
                let of_mixture = ExpertsShape {
                    router: of_mixture.router(),
                    weights: of_mixture.descriptors(),
                    has_biases: of_mixture.biases().is_some(),
                    epilogue: of_mixture.epilogue(),
                };
                push_new(&mut experts, of_mixture);
            }
        }
        PassShape {
            attention,
            last_rows,
            layers,
            experts,
            head,
        }
    }
}

/// Returns the plans of the matmuls of quantised experts for `rows` tokens.
fn expert_plans(name: &str, mixture: &Mixture, rows: usize, dtype: FloatDType) -> Vec<LayerPlan> {
    let Experts::Quant(experts) = &mixture.experts else {
        return Vec::new();
    };
    let layers = ["gate_up_proj", "down_proj"];
    let plans = layers.into_iter().zip(experts.plans(rows, dtype));
    plans
        .map(|(layer, (problem, plan))| LayerPlan {
            layer: format!("{name}.{layer}"),
            problem: problem.into(),
            plan,
        })
        .collect()
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
