//! Tests of GPTQ with 2:4 weights.

use super::{SPECS, hessian, mean, output_error, random, rng};
use crate::{GptqOptions, RowOrder, gptq};
use marlin_format::{Sparsity, check_two_four, prune_two_four, quantize_rtn, quantize_two_four};
use marlin_testing::expect_measured;

#[test]
fn sparsegpt_prunes_with_less_error_than_magnitude() {
    let mut rng = rng();
    let mut of_orders = [const { Vec::new() }; 2];
    for spec in SPECS {
        let (k, n) = (256, 70);
        let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
        let magnitude = output_error(
            &weight,
            &quantize_two_four(weight.clone(), k, n, &spec).unwrap(),
            &hessian,
        );
        let orders = [RowOrder::Natural, RowOrder::WithinGroups];
        for (order, ratios) in orders.into_iter().zip(&mut of_orders) {
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
            ratios.push(error / magnitude);
        }
    }
    let [natural, within_groups] = of_orders.map(|ratios| mean(&ratios));
    expect_measured("natural order to magnitude", natural, 0.0568..=0.1093);
    expect_measured(
        "order within groups to magnitude",
        within_groups,
        0.0482..=0.0697,
    );
}

#[test]
fn weights_that_are_two_four_stay_so() {
    let mut rng = rng();
    let (k, n, spec) = (128, 70, SPECS[0]);
    let hessian = hessian(k, &mut rng);
    let mut weight = random(k * n, &mut rng);
    prune_two_four(&mut weight, k, n).unwrap();
    let mut ratios = Vec::new();
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
        let [error, of_rounding] =
            [&found, &rounded].map(|quantized| output_error(&weight, quantized, &hessian));
        ratios.push(error / of_rounding);
    }
    expect_measured("GPTQ to rounding", mean(&ratios), 0.224..=0.333);
}
