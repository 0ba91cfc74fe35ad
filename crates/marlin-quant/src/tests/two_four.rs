//! Tests of GPTQ with 2:4 weights.

use super::{SPECS, hessian, output_error, random, rng};
use crate::{GptqOptions, RowOrder, gptq};
use marlin_format::{Sparsity, check_two_four, prune_two_four, quantize_rtn, quantize_two_four};

#[test]
fn sparsegpt_prunes_with_less_error_than_magnitude() {
    let mut rng = rng();
    for spec in SPECS {
        let (k, n) = (256, 70);
        let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
        let magnitude = output_error(
            &weight,
            &quantize_two_four(weight.clone(), k, n, &spec).unwrap(),
            &hessian,
        );
        for order in [RowOrder::Natural, RowOrder::WithinGroups] {
            let options = GptqOptions {
                order,
                sparsity: Sparsity::TwoFour,
                ..GptqOptions::default()
            };
            let found = gptq(&weight, n, &hessian, &spec, &options).unwrap();
            assert_eq!(found.weight.sparsity(), Sparsity::TwoFour);
            check_two_four(&found.weight.dequantize(), k, n).unwrap();
            let error = output_error(&weight, &found.weight, &hessian);
            println!("{spec} {order:?}: SparseGPT {error:.3}, magnitude {magnitude:.3}");
            assert!(
                error < 0.6 * magnitude,
                "{spec} {order:?}: {error} of {magnitude}"
            );
        }
    }
}

#[test]
fn weights_that_are_two_four_stay_so() {
    let mut rng = rng();
    let (k, n, spec) = (128, 70, SPECS[0]);
    let hessian = hessian(k, &mut rng);
    let mut weight = random(k * n, &mut rng);
    prune_two_four(&mut weight, k, n).unwrap();
    for sparsity in [Sparsity::Dense, Sparsity::TwoFour] {
        let found = gptq(
            &weight,
            n,
            &hessian,
            &spec,
            &GptqOptions {
                sparsity,
                ..GptqOptions::default()
            },
        )
        .unwrap()
        .weight;
        assert_eq!(found.sparsity(), Sparsity::TwoFour);
        let values = found.dequantize();
        assert!(
            weight
                .iter()
                .zip(&values)
                .all(|(before, after)| *before != 0.0 || *after == 0.0)
        );
        let rounded = quantize_rtn(&weight, k, n, &spec).unwrap();
        assert!(
            output_error(&weight, &found, &hessian)
                < 0.6 * output_error(&weight, &rounded, &hessian)
        );
    }
}
