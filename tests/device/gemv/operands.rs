//! Operands of the matmul of one row with a norm before it, and a launch on these operands.

use crate::kernels::{buffer, bytes};
use crate::marlin::{Bench, problem};
use cubecl::prelude::BufferArg;
use marlin_kernels::{
    ActivationDtype, Epilogue, EpilogueStage, Kernel, NormOperands, Operands as LaunchOperands,
    Plan, Prologue, PrologueStage, Reason, launch,
};
use marlin_testing::{random_values, rms_norm};
use marlin_tests::{Case, Operands, round};
use rand::SeedableRng;
use rand::rngs::StdRng;

pub(super) const EPSILON: f32 = 1e-5;

/// The operands of the kernel, and the expected output.
pub(super) struct GemvOperands {
    x: Vec<f32>,
    residual: Vec<f32>,
    norm: Vec<f32>,
    /// The sum of `x` and `residual`, rounded.
    pub(super) sum: Vec<f32>,
    /// The operands of the matmul, with the exact norm as activations.
    pub(super) operands: Operands,
}

impl GemvOperands {
    /// Draws operands with a residual stream like that of a model: two halves of very different
    /// magnitude, and one value far above all others.
    pub(super) fn random(case: &Case, seed: u64) -> Self {
        let Case {
            k,
            activations: dtype,
            ..
        } = *case;
        let mut rng = StdRng::seed_from_u64(seed);
        let mut operands = Operands::random(case, seed);
        let mut residual = random(k / 2, 1e-3, dtype, &mut rng);
        residual.extend(random(k - k / 2, 1.0, dtype, &mut rng));
        residual[k - 1] = 4000.0;
        let (x, mut norm) = (
            random(k, 0.01, dtype, &mut rng),
            random(k, 2.0, dtype, &mut rng),
        );
        // Weights of 8 bits are up to 5.1. Without this factor, gates and ups could exceed 256 and
        // their product the range of f16.
        norm[k - 1] *= 0.25;
        let sum = rounded(residual.iter().zip(&x).map(|(a, b)| a + b), dtype);
        let exact = rms_norm(&sum, &norm, EPSILON.into());
        operands.x = exact.into_iter().map(|value| value as f32).collect();
        operands.recompute(case);
        Self {
            x,
            residual,
            norm,
            sum,
            operands,
        }
    }

    /// Runs a case on outputs filled with NaN, and returns the bytes of the output and of the sum.
    pub(super) fn run(
        &self,
        bench: &Bench,
        case: &Case,
        blocks: usize,
        epilogue: Epilogue,
    ) -> [Vec<u8>; 2] {
        let dtype = case.activations;
        let problem = problem(case)
            .with_prologue(Prologue::AddRmsNorm)
            .with_epilogue(epilogue);
        let arg = |values: &[f32]| buffer(&bench.client, &bytes(values, dtype), values.len());
        let handles = [problem.outputs(), case.k].map(|elements| {
            bench
                .client
                .create_from_slice(&bytes(&vec![f32::NAN; elements], dtype))
        });
        // SAFETY: the buffers were made for as many elements.
        let [out, sum] = unsafe {
            [
                BufferArg::from_raw_parts(handles[0].clone(), problem.outputs()),
                BufferArg::from_raw_parts(handles[1].clone(), case.k),
            ]
        };
        let norm = NormOperands {
            residual: arg(&self.residual),
            weight: arg(&self.norm),
            sum,
            epsilon: EPSILON,
        };
        let operands = LaunchOperands {
            x: arg(&self.x),
            norm: Some(norm),
            ..bench.operands(case, &self.operands, out)
        };
        launch(&bench.client, &problem, &plan(blocks, epilogue), operands)
            .unwrap_or_else(|error| panic!("{case}: {error}"));
        handles.map(|handle| {
            bench
                .client
                .read_one(handle)
                .unwrap_or_else(|error| panic!("{case}, {blocks} blocks: {error}"))
                .to_vec()
        })
    }
}

/// Returns the plan of a launch on clusters of `blocks` blocks.
pub(super) fn plan(blocks: usize, epilogue: Epilogue) -> Plan {
    let product = Plan::product(
        Kernel::Gemv { blocks },
        Reason::TensorCores { capability: 90 },
    );
    let epilogue = if epilogue == Epilogue::None {
        EpilogueStage::None
    } else {
        EpilogueStage::InKernel
    };
    Plan {
        prologue: PrologueStage::InKernel,
        epilogue,
        ..product
    }
}

/// Rounds values to a dtype.
fn rounded(exact: impl Iterator<Item = f32>, dtype: ActivationDtype) -> Vec<f32> {
    exact.map(|value| round(value, dtype)).collect()
}

fn random(count: usize, size: f32, dtype: ActivationDtype, rng: &mut StdRng) -> Vec<f32> {
    rounded(random_values(count, size, rng).into_iter(), dtype)
}
