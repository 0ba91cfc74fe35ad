//! The units on which the kernels of plans run.

use marlin_kernels::{Kernel, Plan};

/// Returns true if the kernel of a plan computes on tensor cores: the tiled Marlin kernel for any
/// number of rows, or the matmul of one row.
pub fn runs_on_tensor_cores(plan: &Plan) -> bool {
    matches!(plan.kernel, Kernel::Marlin(_) | Kernel::Gemv { .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases;
    use marlin_format::WeightLayout;
    use marlin_kernels::{
        ActivationDtype, Card, QuantProblem, Runtime, Target, device_layout, plan,
    };
    use std::collections::BTreeSet;

    /// Checks the plans that the device tests expect, for cards of every compute capability: other
    /// tests see a card's plans only on that card.
    #[test]
    fn half_precision_runs_on_the_tensor_cores_of_every_card() {
        let mut kernels = BTreeSet::new();
        for (capability, shared) in [
            (80, 163),
            (86, 99),
            (89, 99),
            (90, 227),
            (100, 227),
            (120, 99),
        ] {
            let target = Target {
                runtime: Runtime::Cuda,
                card: Some(Card::assumed(capability, 108, shared * 1024)),
            };
            for case in cases() {
                // A layer casts scales in f32 to the dtype of activations if that is half
                // precision.
                let half = case.activations != ActivationDtype::F32;
                let problem = if half {
                    case.problem().with_scales(case.activations)
                } else {
                    case.problem()
                };
                let weight = device_layout(&problem, &target);
                let plan = plan(QuantProblem { weight, ..problem }, &target);
                assert_eq!(
                    runs_on_tensor_cores(&plan),
                    half,
                    "{case} on {capability}: {plan}, because {}",
                    plan.reason
                );
                assert_eq!(
                    weight.layout == WeightLayout::Tile,
                    half,
                    "{case} on {capability}: laid out {}",
                    weight.layout
                );
                kernels.insert(match plan.kernel {
                    Kernel::Marlin(_) => "tiles",
                    Kernel::Gemv { .. } => "one row",
                    _ => "others",
                });
            }
        }
        assert_eq!(
            kernels,
            BTreeSet::from(["tiles", "one row", "others"]),
            "the cases have problems for each"
        );
    }
}
