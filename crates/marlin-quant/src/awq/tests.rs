use super::{SMALLEST, awq_scales};
use crate::tests::{SPECS, activations, mean, output_error_of, random, rng, tensor};
use crate::{GptqOptions, HessianSums, QuantError, gptq_beside};
use burn::tensor::Device;
use marlin_format::{GroupSize, QuantSpec, quantize_rtn};
use marlin_testing::expect_measured;
use rand::RngExt;

fn sums(rows: Vec<f32>, k: usize) -> HessianSums {
    let mut sums = HessianSums::new(k, &Device::flex());
    sums.add(tensor(rows, k)).unwrap();
    sums
}

/// Gives every feature its own channel.
fn apart(k: usize) -> Vec<usize> {
    (0..k).collect()
}

/// Makes a feature larger and its weights smaller, as in trained models.
fn enlarge(feature: usize, times: f32, rows: &mut [f32], weight: &mut [f32], n: usize) {
    let k = weight.len() / n;
    rows.iter_mut()
        .skip(feature)
        .step_by(k)
        .for_each(|value| *value *= times);
    weight[feature * n..(feature + 1) * n]
        .iter_mut()
        .for_each(|value| *value /= times);
}

/// Multiplies a weight [K, N] by `scales`, rounds it, and divides by `scales` again.
fn rounded(weight: &[f32], n: usize, scales: &[f32], spec: &QuantSpec) -> Vec<f32> {
    let scaled: Vec<f32> = weight
        .iter()
        .enumerate()
        .map(|(i, value)| value * scales[i / n])
        .collect();
    let found = quantize_rtn(&scaled, scales.len(), n, spec)
        .unwrap()
        .dequantize();
    found
        .iter()
        .enumerate()
        .map(|(i, value)| value / scales[i / n])
        .collect()
}

#[test]
fn large_inputs_cost_less_with_scales() {
    let mut rng = rng();
    let mut ratios = Vec::new();
    for spec in SPECS.into_iter().filter(|spec| spec.value.max() == 15) {
        let (k, n) = (200, 24);
        let (mut weight, mut rows) = (random(k * n, &mut rng), random(400 * k, &mut rng));
        let first = rng.random_range(0..40);
        for feature in (first..k).step_by(40) {
            enlarge(feature, 40.0, &mut rows, &mut weight, n);
        }
        let sums = sums(rows, k);
        let scales = awq_scales(&weight, n, &sums, &apart(k), &spec).unwrap();
        let hessian = sums.hessian().unwrap();
        let error = |scales: &[f32]| {
            output_error_of(&weight, &rounded(&weight, n, scales, &spec), &hessian)
        };
        let (before, after) = (error(&vec![1.0; k]), error(&scales));
        println!("{spec}: {after:.3} with scales, {before:.3} without");
        ratios.push(after / before);
        let (large, others) = (scales[first], scales[(first + 1) % k]);
        assert!(large > 1.0 && others < 1.0, "{spec}: {large} and {others}");
    }
    expect_measured(
        "the error with scales to that without",
        mean(&ratios),
        0.138..=0.170,
    );
}

#[test]
fn scales_are_one_where_nothing_is_gained() {
    let mut rng = rng();
    let (k, n, tokens) = (64, 9, 300);
    let spec = QuantSpec::int4(GroupSize::G32).with_zero_points();
    let ones = vec![1.0; k];
    // Inputs of one size.
    let signs = (0..tokens * k)
        .map(|_| if rng.random() { 1.0 } else { -1.0 })
        .collect();
    let weight = random(k * n, &mut rng);
    assert_eq!(
        awq_scales(&weight, n, &sums(signs, k), &apart(k), &spec).unwrap(),
        ones
    );
    // A weight whose values are all levels.
    let levels: Vec<f32> = (0..k * n).map(|i| (i / n % 16) as f32 - 5.0).collect();
    let inputs = sums(activations(tokens, k, &mut rng), k);
    assert_eq!(
        awq_scales(&levels, n, &inputs, &apart(k), &spec).unwrap(),
        ones
    );
    // Few tokens, or none.
    let few = sums(activations(127, k, &mut rng), k);
    assert_eq!(
        awq_scales(&weight, n, &few, &apart(k), &spec).unwrap(),
        ones
    );
    assert_eq!(
        awq_scales(&weight, n, &sums(vec![0.0; 128 * k], k), &apart(k), &spec).unwrap(),
        ones
    );
}

#[test]
fn dead_features_have_the_smallest_scale() {
    let mut rng = rng();
    let (k, n, spec) = (64, 16, SPECS[0]);
    let (mut weight, mut rows) = (random(k * n, &mut rng), random(300 * k, &mut rng));
    rows.chunks_exact_mut(k)
        .for_each(|row| (row[3], row[40], row[5]) = (0.0, 0.0, 1e-12 * row[5]));
    enlarge(7, 40.0, &mut rows, &mut weight, n);
    let scales = awq_scales(&weight, n, &sums(rows, k), &apart(k), &spec).unwrap();
    // Feature 5 is almost dead.
    assert_eq!([scales[3], scales[40]], [scales[5]; 2]);
    let limit = (1.0 / SMALLEST.sqrt()) as f32;
    assert!(
        scales[5] < 0.9 && scales[5] > 1.0 / limit && scales[7] > 1.1 && scales[7] < limit,
        "{scales:?}"
    );
}

#[test]
fn features_of_one_channel_have_one_scale() {
    let mut rng = rng();
    let (k, n, spec) = (96, 16, SPECS[0]);
    let weight: Vec<f32> = random(k * n, &mut rng)
        .into_iter()
        .map(|value| value.powi(3))
        .collect();
    let sums = sums(activations(400, k, &mut rng), k);
    let channels: Vec<usize> = (0..k)
        .map(|feature| feature / 16 * 8 + feature % 8)
        .collect();
    let scales = awq_scales(&weight, n, &sums, &channels, &spec).unwrap();
    assert_eq!(scales.len(), k / 2);
    let squares = sums.diagonal().unwrap();
    let size = |channel: usize| {
        let of_channel = channels
            .iter()
            .zip(&squares)
            .filter(|&(&found, _)| found == channel);
        of_channel
            .map(|(_, square)| square / 2.0)
            .sum::<f64>()
            .sqrt()
    };
    // The same power of every size.
    let power = |channel: usize| {
        (f64::from(scales[channel]) / f64::from(scales[0])).ln() / (size(channel) / size(0)).ln()
    };
    let ratio = (power(1) * 20.0).round() / 20.0;
    assert!((0.0..1.0).contains(&ratio));
    for channel in 1..k / 2 {
        let expected = (size(channel) / size(0)).powf(ratio) * f64::from(scales[0]);
        assert!(
            (f64::from(scales[channel]) / expected - 1.0).abs() < 1e-3,
            "channel {channel}: {} of {expected}",
            scales[channel]
        );
    }
}

/// Checks that sums of divided inputs and divided sums give the same GPTQ weight, apart from
/// rounding.
#[test]
fn divided_sums_are_those_of_divided_inputs() {
    let mut rng = rng();
    let (k, n, tokens) = (40, 12, 300);
    let (weight, x) = (random(k * n, &mut rng), activations(tokens, k, &mut rng));
    let float: Vec<f32> = x
        .iter()
        .map(|value| value * rng.random_range(0.9..1.1))
        .collect();
    let residual = random(tokens * n, &mut rng);
    let scales: Vec<f32> = (0..k).map(|_| rng.random_range(0.2..5.0)).collect();
    let sums_of = |scales: &[f32], with_residual: bool| {
        let divided = |rows: &[f32]| {
            tensor(
                rows.iter()
                    .enumerate()
                    .map(|(i, value)| value / scales[i % k])
                    .collect(),
                k,
            )
        };
        let mut sums = HessianSums::new(k, &Device::flex());
        match with_residual {
            true => sums
                .add_with_residual(divided(&x), tensor(residual.clone(), n))
                .unwrap(),
            false => sums.add_beside(divided(&x), divided(&float)).unwrap(),
        }
        sums
    };
    let near = |found: &[f32], expected: &[f32]| {
        let norm = |values: &mut dyn Iterator<Item = f32>| {
            values
                .map(|value| f64::from(value).powi(2))
                .sum::<f64>()
                .sqrt()
        };
        let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
        assert!(
            difference < 1e-4 * norm(&mut expected.iter().copied()),
            "{difference}"
        );
    };
    let values = |tensor: burn::tensor::Tensor<2>| tensor.try_into_vec_as::<f32>().unwrap();
    let correction =
        |sums: &HessianSums| values(sums.correction(tensor(weight.clone(), n), 0..n).unwrap());
    for with_residual in [false, true] {
        let (found, expected) = (
            sums_of(&vec![1.0; k], with_residual).divided(&scales),
            sums_of(&scales, with_residual),
        );
        assert_eq!(found.tokens(), expected.tokens());
        near(&values(found.sum()), &values(expected.sum()));
        near(&correction(&found), &correction(&expected));
        let losses = [found, expected].map(|sums| {
            gptq_beside(&weight, n, &sums, &SPECS[0], &GptqOptions::default())
                .unwrap()
                .loss()
        });
        assert!((losses[0] / losses[1] - 1.0).abs() < 0.05, "{losses:?}");
    }
}

#[test]
fn wrong_weights_are_refused() {
    let mut rng = rng();
    let sums = sums(random(200 * 32, &mut rng), 32);
    let error = awq_scales(&[0.0; 63], 2, &sums, &apart(32), &SPECS[0]);
    assert_eq!(
        error,
        Err(QuantError::Shape {
            k: 32,
            n: 2,
            found: 63
        })
    );
    assert!(matches!(
        awq_scales(&[f32::NAN; 64], 2, &sums, &apart(32), &SPECS[0]),
        Err(QuantError::Format(_))
    ));
}
