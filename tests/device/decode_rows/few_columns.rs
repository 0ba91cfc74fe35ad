//! Products with weights of few columns, on cards.

use super::{poisoned, random, read};
use crate::kernels::{buffer, client};
use crate::setup::computes;
use burn::tensor::Device;
use marlin_kernels::matmul::few_columns::{launch, supports};
use marlin_kernels::matmul::float::FloatOperands;
use marlin_kernels::{ActivationDtype, FloatProblem, Target};
use marlin_testing::relative_error_of_terms;
use marlin_tests::tolerance;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Checks numbers of rows and columns around those of a block, and features that the steps of all
/// warps divide and do not divide.
pub(super) fn agrees(device: &Device, seed: u64) {
    let (client, mut rng) = (client(device), StdRng::seed_from_u64(seed));
    let target = Target::of(&client);
    for dtype in [ActivationDtype::F16, ActivationDtype::BF16] {
        if !computes(device, dtype) {
            continue;
        }
        for (m, k, n) in [
            (2, 32, 1),
            (3, 512, 8),
            (8, 2048, 128),
            (9, 2080, 60),
            (17, 4096, 16),
            (64, 2880, 33),
            (128, 544, 1024),
        ] {
            let problem = FloatProblem { m, k, n, dtype };
            if !supports(&problem, &target) {
                assert!(
                    target.card.is_none_or(|card| card.capability < 80),
                    "{problem}"
                );
                continue;
            }
            let (x, x_bytes) = random(m * k, dtype, &mut rng);
            let (weight, weight_bytes) = random(n * k, dtype, &mut rng);
            let (out, out_arg) = poisoned(&client, m * n, dtype);
            let operands = FloatOperands {
                x: buffer(&client, &x_bytes, x.len()),
                weight: buffer(&client, &weight_bytes, weight.len()),
                bias: None,
                out: out_arg,
            };
            launch(&client, &problem, operands)
                .unwrap_or_else(|error| panic!("{problem}: {error}"));
            let sum = |of: &dyn Fn(f64) -> f64| -> Vec<f64> {
                let terms = |row: usize, column: usize| {
                    let pairs = x[row * k..].iter().zip(&weight[column * k..]).take(k);
                    pairs.map(|(x, weight)| of(x * weight)).sum()
                };
                (0..m)
                    .flat_map(|row| (0..n).map(move |column| (row, column)))
                    .map(|(row, column)| terms(row, column))
                    .collect()
            };
            let magnitude: Vec<f64> = sum(&|term| term * term)
                .iter()
                .map(|sum| sum.sqrt())
                .collect();
            let found = read(&client, out, dtype);
            let error = relative_error_of_terms(&found, &sum(&|term| term), &magnitude);
            assert!(
                error <= tolerance(dtype),
                "{problem}, seed {seed}: relative error {error:e}"
            );
        }
    }
}
