//! The layer of experts of a mixture as a Burn backend extension, for CubeCL's runtimes and for
//! Flex.

#[cfg(feature = "cubecl-runtime")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
mod flex;

use super::{
    OptionalFloat, OptionalFloatMetadata, QuantTensors, QuantTensorsMetadata, linear_shape,
};
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use marlin_format::WeightDescriptor;
#[cfg(feature = "cubecl-runtime")]
use marlin_format::WeightLayout;
#[cfg(feature = "cubecl-runtime")]
use marlin_kernels::experts::LayerPlan;
use marlin_kernels::experts::Router;
use marlin_kernels::{Epilogue, Plan, QuantProblem, Target};
#[cfg(feature = "cubecl-runtime")]
use marlin_kernels::{EpilogueStage, Kernel, Reason};

/// A backend with the layer of experts of a mixture.
///
/// Shapes and dtypes are checked by [`QuantExperts`](crate::experts::QuantExperts), which calls the
/// operation on devices alone that have its kernels.
#[backend_extension(
    Cube: cfg(feature = "cubecl-runtime"),
    Flex: cfg(feature = "flex"),
    Fusion
)]
pub trait ExpertsBackend: Backend {
    /// Returns the weighted sum [tokens, N of down] of the outputs of each token's experts, for
    /// activations [tokens, K] and the router's logits [tokens, experts]. The weights of experts
    /// are multiplied by `factor`; a `correction` `[experts]` in f32 is added to the scores before
    /// experts are chosen. Biases are [experts, N]. `epilogue` is computed from gates and ups.
    #[fusion(meta = experts_spec)]
    #[allow(clippy::too_many_arguments, reason = "the operands of the layer")]
    fn quant_experts(
        x: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        #[extension_type] correction: OptionalFloat<Self>,
        #[extension_type] gate_up: QuantTensors<Self>,
        gate_up_descriptor: WeightDescriptor,
        #[extension_type] gate_up_bias: OptionalFloat<Self>,
        #[extension_type] down: QuantTensors<Self>,
        down_descriptor: WeightDescriptor,
        #[extension_type] down_bias: OptionalFloat<Self>,
        router: Router,
        factor: f64,
        epilogue: Epilogue,
    ) -> FloatTensor<Self>;
}

#[allow(clippy::too_many_arguments, reason = "the operands of the layer")]
fn experts_spec(
    x: &TensorSpec,
    _logits: &TensorSpec,
    _correction: &OptionalFloatMetadata,
    _gate_up: &QuantTensorsMetadata,
    _gate_up_descriptor: &WeightDescriptor,
    _gate_up_bias: &OptionalFloatMetadata,
    _down: &QuantTensorsMetadata,
    down_descriptor: &WeightDescriptor,
    _down_bias: &OptionalFloatMetadata,
    _router: &Router,
    _factor: &f64,
    _epilogue: &Epilogue,
) -> TensorSpec {
    TensorSpec::new(linear_shape(&x.shape, down_descriptor.n), x.dtype)
}

/// Returns the launches of a layer for a number of tokens; `None` if the device has no kernels for
/// it.
#[cfg(feature = "cubecl-runtime")]
fn plan(
    gate_up: &QuantProblem,
    down: &QuantProblem,
    tokens: usize,
    target: &Target,
) -> Option<LayerPlan> {
    let is_tile = |problem: &QuantProblem| problem.weight.layout == WeightLayout::Tile;
    if !is_tile(gate_up) || !is_tile(down) {
        return None;
    }
    marlin_kernels::experts::plan(gate_up, down, tokens, &target.card?)
}

/// Returns the plans of a layer's matmuls for a number of tokens: those of the kernels for experts,
/// or otherwise of one expert's matmul.
pub(crate) fn plans(problems: [QuantProblem; 2], tokens: usize, target: &Target) -> [Plan; 2] {
    #[cfg(feature = "cubecl-runtime")]
    if let Some(card) = target.card
        && let Some(layer) = plan(&problems[0], &problems[1], tokens, target)
    {
        let reason = Reason::TensorCores {
            capability: card.capability,
        };
        let kernels = match layer {
            LayerPlan::Rows(plan) => {
                [plan.gate_up, plan.down].map(|blocks| Kernel::Gemv { blocks })
            }
            LayerPlan::Tiles(plan) => [plan.gate_up, plan.down].map(Kernel::Marlin),
        };
        let [gate_up, down] = kernels.map(|kernel| Plan::product(kernel, reason));
        let gate_up = Plan {
            epilogue: EpilogueStage::InKernel,
            ..gate_up
        };
        return [gate_up, down];
    }
    let _ = tokens;
    problems.map(|problem| {
        let of_one = QuantProblem {
            weight: problem.weight.with_experts(1),
            ..problem
        };
        marlin_kernels::plan(of_one, target)
    })
}

/// Returns true if a CubeCL device has kernels for a layer.
pub(crate) fn has_plan(gate_up: &QuantProblem, down: &QuantProblem, target: &Target) -> bool {
    #[cfg(feature = "cubecl-runtime")]
    return plan(gate_up, down, 1, target).is_some();
    #[cfg(not(feature = "cubecl-runtime"))]
    {
        let _ = (gate_up, down, target);
        false
    }
}
