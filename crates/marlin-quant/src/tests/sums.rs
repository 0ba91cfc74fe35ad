//! Tests of sums on a device, and of layers quantised with them.

use super::{SPECS, activations, mean, random, rng, tensor};
use crate::{
    GptqOptions, Hessian, HessianSums, QuantError, Quantizer, gptq_beside, round_with_clipping,
};
use burn::tensor::{Device, Tensor, TensorData};
use marlin_format::Sparsity;
use marlin_testing::expect_measured;
use rand::RngExt;

#[test]
fn the_devices_sums_are_those_of_the_host() {
    let mut rng = rng();
    let (k, device) = (40, Device::flex());
    let (mut host, mut sums) = (Hessian::new(k), HessianSums::new(k, &device));
    for tokens in [70, 1, 33] {
        let rows = activations(tokens, k, &mut rng);
        host.add(&rows).unwrap();
        sums.add(Tensor::from_data(
            TensorData::new(rows, [tokens, k]),
            &device,
        ))
        .unwrap();
    }
    let found = sums.hessian().unwrap();
    assert_eq!((found.tokens(), found.features()), (104, k));
    let size = |i: usize, j: usize| (host.get(i, i) * host.get(j, j)).sqrt();
    for (i, j) in (0..k).flat_map(|i| (0..k).map(move |j| (i, j))) {
        assert!(
            (found.get(i, j) - host.get(i, j)).abs() <= 1e-5 * size(i, j),
            "[{i}, {j}]: {} of {}",
            found.get(i, j),
            host.get(i, j)
        );
    }
    let mut sums = HessianSums::new(2, &device);
    sums.add(Tensor::from_data([[1.0, 2.0]], &device)).unwrap();
    sums.add(Tensor::from_data([[1.0, f32::NAN]], &device))
        .unwrap();
    // Batches are checked when there are sixteen of them, or when the sums are used.
    let refused = QuantError::NonFiniteBatch { batch: 1 };
    assert_eq!(sums.hessian(), Err(refused.clone()));
    let mut add = || sums.add(Tensor::from_data([[1.0, 2.0]], &device));
    for _ in 2..15 {
        add().unwrap();
    }
    assert_eq!(add(), Err(refused));
}

/// Checks that outputs are nearer to those of the float model if the sums include the float model's
/// inputs, or a residual.
#[test]
fn outputs_make_up_for_inputs_that_are_off() {
    let mut rng = rng();
    let (k, n, tokens) = (64, 20, 400);
    let (weight, float) = (random(k * n, &mut rng), activations(tokens, k, &mut rng));
    let float = tensor(float, k);
    // The part of the inputs' error, and of the residual, that a change of the weight can
    // compensate for.
    let (mix, matrix) = (
        tensor(random(k * k, &mut rng), k),
        tensor(random(k * n, &mut rng), n),
    );
    let noise = tensor(
        (0..tokens * k)
            .map(|_| rng.random_range(0.98..1.02))
            .collect(),
        k,
    );
    let x = (float.clone() + float.clone().matmul(mix).mul_scalar(0.02)) * noise;
    let residual = x.clone().matmul(matrix.clone()).mul_scalar(0.2);
    let weights = tensor(weight.clone(), n);
    let (mut halves, mut wholes) = (Vec::new(), Vec::new());
    for with_residual in [false, true] {
        let mut expected = float.clone().matmul(weights.clone());
        if with_residual {
            expected = expected + residual.clone();
        }
        let mut sums = HessianSums::new(k, &Device::flex());
        for rows in [0..100, 100..tokens] {
            let part = |tensor: &Tensor<2>| tensor.clone().slice(rows.clone());
            let x = part(&x);
            match with_residual {
                true => sums
                    .add_with_residual(x.clone(), part(&expected) - x.matmul(weights.clone()))
                    .unwrap(),
                false => sums.add_beside(x, part(&float)).unwrap(),
            }
        }
        let error_at = |correction| {
            let options = GptqOptions {
                correction,
                ..GptqOptions::default()
            };
            let found = gptq_beside(&weight, n, &sums, &SPECS[0], &options).unwrap();
            let errors = x.clone().matmul(tensor(found.weight.dequantize(), n)) - expected.clone();
            f64::from(errors.square().sum().into_scalar::<f32>())
        };
        let [none, half, all] = [0.0, 0.5, 1.0].map(error_at);
        println!(
            "residual {with_residual}: {none} without correction, {half} half of it, {all} all"
        );
        halves.push(half / none);
        wholes.push(all / half);
    }
    // The error of the quantisation itself remains.
    expect_measured(
        "half of the correction to none",
        mean(&halves),
        0.2585..=0.2802,
    );
    expect_measured(
        "all of the correction to half",
        mean(&wholes),
        0.0569..=0.1074,
    );
}

#[test]
fn layers_that_saw_little_are_rounded() {
    let mut rng = rng();
    let (k, n, spec) = (64, 8, SPECS[0]);
    let weight = random(k * n, &mut rng);
    for tokens in [127, 128] {
        let mut sums = HessianSums::new(k, &Device::flex());
        sums.add(tensor(activations(tokens, k, &mut rng), k))
            .unwrap();
        let found = GptqOptions::default()
            .quantize(&weight, k, n, Some(&sums), &spec)
            .unwrap();
        assert_eq!(
            (found.fell_back, found.losses.is_some()),
            (tokens < 128, tokens >= 128)
        );
        if found.fell_back {
            assert_eq!(
                found.weight,
                round_with_clipping(&weight, k, n, &spec, Sparsity::Dense).unwrap()
            );
        }
    }
}
