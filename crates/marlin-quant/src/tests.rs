mod equations;
mod sums;
mod two_four;

use crate::{GptqOptions, Hessian, QuantError, RowOrder, gptq, round_with_clipping};
use burn::tensor::{Device, Tensor, TensorData};
use marlin_format::{
    FormatError, GroupSize, PlainWeight, QuantSpec, ScaleDtype, Sparsity, quantize_rtn,
};
pub(crate) use marlin_testing::rng;
use marlin_testing::{expect_measured, layer_inputs, random_values};
use rand::rngs::StdRng;

pub(crate) fn random(count: usize, rng: &mut StdRng) -> Vec<f32> {
    random_values(count, 1.0, rng)
}

/// Returns activations [tokens, K] like those of a model.
pub(crate) fn activations(tokens: usize, k: usize, rng: &mut StdRng) -> Vec<f32> {
    layer_inputs(tokens, k, 3.0, rng)
}

/// Returns the mean of the ratios of errors of several formats. It varies less than the ratio of
/// one format.
pub(crate) fn mean(ratios: &[f64]) -> f64 {
    ratios.iter().sum::<f64>() / ratios.len() as f64
}

fn hessian(k: usize, rng: &mut StdRng) -> Hessian {
    let mut hessian = Hessian::new(k);
    // Documents of different lengths.
    for tokens in [3 * k, 1, k / 2 + 1] {
        hessian.add(&activations(tokens, k, rng)).unwrap();
    }
    hessian
}

fn output_error(weight: &[f32], quantized: &PlainWeight, hessian: &Hessian) -> f64 {
    output_error_of(weight, &quantized.dequantize(), hessian)
}

/// Returns the squared error of all outputs, computed from the definition.
pub(crate) fn output_error_of(weight: &[f32], quantized: &[f32], hessian: &Hessian) -> f64 {
    let (k, n) = (hessian.features(), weight.len() / hessian.features());
    let errors: Vec<f64> = weight
        .iter()
        .zip(quantized)
        .map(|(a, b)| f64::from(*a) - f64::from(*b))
        .collect();
    let of_column = |column: usize| {
        let products = (0..k).flat_map(|i| (0..k).map(move |j| (i, j)));
        products
            .map(|(i, j)| errors[i * n + column] * hessian.get(i, j) * errors[j * n + column])
            .sum::<f64>()
    };
    (0..n).map(of_column).sum()
}

pub(crate) const SPECS: [QuantSpec; 5] = [
    QuantSpec::int4(GroupSize::G32),
    QuantSpec::int4(GroupSize::G64).with_zero_points(),
    QuantSpec::int4(GroupSize::G128).with_scale_dtype(ScaleDtype::BF16),
    QuantSpec::int4(GroupSize::Channel),
    QuantSpec::int8(GroupSize::G128).with_zero_points(),
];

/// The formats of floats.
const FLOATS: [QuantSpec; 3] = [QuantSpec::fp8(), QuantSpec::mxfp4(), QuantSpec::nvfp4()];

#[test]
fn the_loss_is_that_of_the_outputs() {
    let mut rng = rng();
    let (k, n) = (96, 40);
    let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
    let options = GptqOptions {
        damping: 1e-7,
        ..GptqOptions::default()
    };
    let found = gptq(&weight, n, &hessian, &SPECS[0], &options).unwrap();
    let expected = output_error(&weight, &found.weight, &hessian) / hessian.tokens() as f64;
    assert!(
        (found.loss() / expected - 1.0).abs() < 0.02,
        "{} of {expected}",
        found.loss()
    );
}

#[test]
fn outputs_are_nearer_than_those_of_rounding() {
    let mut rng = rng();
    let mut of_orders = [const { Vec::new() }; 3];
    for spec in SPECS.into_iter().chain(FLOATS) {
        let (k, n) = (256, 48);
        let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
        let error = |quantized: &PlainWeight| output_error(&weight, quantized, &hessian);
        let rounded = error(&quantize_rtn(&weight, k, n, &spec).unwrap());
        let clipped = error(&round_with_clipping(&weight, k, n, &spec, Sparsity::Dense).unwrap());
        let of_order = |order| {
            let found = gptq(
                &weight,
                n,
                &hessian,
                &spec,
                &GptqOptions {
                    order,
                    ..GptqOptions::default()
                },
            )
            .unwrap();
            assert_eq!(
                found.weight.row_permutation().is_some(),
                order == RowOrder::ActOrder
            );
            error(&found.weight)
        };
        let orders = [
            RowOrder::Natural,
            RowOrder::ActOrder,
            RowOrder::WithinGroups,
        ]
        .map(of_order);
        println!("{spec}: rounded {rounded:.3}, clipped {clipped:.3}, GPTQ {orders:.3?}");
        for (ratios, error) in of_orders.iter_mut().zip(orders) {
            ratios.push(error / rounded.min(clipped));
        }
    }
    let [natural, act_order, within_groups] = of_orders.map(|ratios| mean(&ratios));
    expect_measured("natural order to rounding", natural, 0.265..=0.32);
    expect_measured("act-order to rounding", act_order, 0.0745..=0.0886);
    expect_measured(
        "order within groups to rounding",
        within_groups,
        0.142..=0.169,
    );
}

#[test]
fn clipping_leaves_no_larger_error_than_the_whole_range() {
    let mut rng = rng();
    for spec in SPECS.into_iter().chain(FLOATS) {
        let (k, n) = (200, 17);
        let mut weight = random(k * n, &mut rng);
        // Outliers, for which clipping is intended.
        weight
            .iter_mut()
            .step_by(97)
            .for_each(|value| *value *= 3.0);
        let error = |quantized: PlainWeight| {
            let differences = weight
                .iter()
                .zip(quantized.dequantize())
                .map(|(a, b)| f64::from(a - b).powi(2));
            differences.sum::<f64>()
        };
        let (whole, clipped) = (
            error(quantize_rtn(&weight, k, n, &spec).unwrap()),
            error(round_with_clipping(&weight, k, n, &spec, Sparsity::Dense).unwrap()),
        );
        assert!(
            clipped <= whole * (1.0 + 1e-9),
            "{spec}: {clipped} of {whole}"
        );
    }
}

#[test]
fn dead_features_are_rounded_and_counted() {
    let mut rng = rng();
    let (k, n, spec) = (64, 8, SPECS[0]);
    let weight = random(k * n, &mut rng);
    let mut rows = activations(100, k, &mut rng);
    let dead = [3, 31, 40];
    rows.chunks_exact_mut(k)
        .for_each(|row| dead.iter().for_each(|&feature| row[feature] = 0.0));
    let mut hessian = Hessian::new(k);
    hessian.add(&rows).unwrap();
    let found = gptq(&weight, n, &hessian, &spec, &GptqOptions::default()).unwrap();
    assert_eq!(found.dead, dead.len());
    for (row, column) in dead
        .into_iter()
        .flat_map(|row| (0..n).map(move |column| (row, column)))
    {
        let scale = found.weight.scales().get(row / 32 * n + column);
        let nearest = ((weight[row * n + column] / scale).round_ties_even() + 8.0).clamp(0.0, 15.0);
        assert_eq!(
            f32::from(found.weight.q(row, column)),
            nearest,
            "row {row}, column {column}"
        );
    }
    // A layer without calibration tokens.
    let found = gptq(&weight, n, &Hessian::new(k), &spec, &GptqOptions::default()).unwrap();
    assert_eq!((found.dead, found.loss()), (k, 0.0));
}

#[test]
fn damping_grows_where_features_depend_on_each_other() {
    let mut rng = rng();
    let (k, n) = (48, 4);
    let weight = random(k * n, &mut rng);
    let mut hessian = Hessian::new(k);
    // Fewer tokens than features.
    hessian.add(&activations(5, k, &mut rng)).unwrap();
    let found = gptq(
        &weight,
        n,
        &hessian,
        &SPECS[0],
        &GptqOptions {
            damping: 0.0,
            ..GptqOptions::default()
        },
    )
    .unwrap();
    assert!(
        found.damping > 0.0 && found.loss().is_finite(),
        "damping {:e}, loss {}",
        found.damping,
        found.loss()
    );
}

#[test]
fn the_same_arguments_give_the_same_weight() {
    let mut rng = rng();
    let (k, n) = (128, 200);
    let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
    let run = || gptq(&weight, n, &hessian, &SPECS[1], &GptqOptions::default()).unwrap();
    let first = run();
    let one_thread = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    assert_eq!(one_thread.install(run), first);
}

pub(crate) fn tensor(values: Vec<f32>, columns: usize) -> Tensor<2> {
    let rows = values.len() / columns;
    Tensor::from_data(TensorData::new(values, [rows, columns]), &Device::flex())
}

/// Levels reach one step further below zero than above it. The sign of the scale is chosen so that
/// they reach further on the side that needs it.
#[test]
fn scales_have_the_sign_that_fits() {
    let (k, n) = (32, 2);
    // Column 0 has values from -7 to +8, and column 1 has their negatives.
    let weight: Vec<f32> = (0..k)
        .flat_map(|row| [(row % 16) as f32 - 7.0, 7.0 - (row % 16) as f32])
        .collect();
    let spec = QuantSpec::int4(GroupSize::G32);
    let exact = round_with_clipping(&weight, k, n, &spec, Sparsity::Dense).unwrap();
    let error: f32 = weight
        .iter()
        .zip(exact.dequantize())
        .map(|(a, b)| (a - b).powi(2))
        .sum();
    assert!(exact.scales().get(0) < 0.0 && exact.scales().get(1) > 0.0);
    let rounded = quantize_rtn(&weight, k, n, &spec).unwrap();
    let plain: f32 = weight
        .iter()
        .zip(rounded.dequantize())
        .map(|(a, b)| (a - b).powi(2))
        .sum();
    // The weights are given, and so is the ratio.
    expect_measured(
        "signed scales to others",
        f64::from(error / plain),
        0.0019..=0.0019,
    );
}

#[test]
fn wrong_arguments_are_refused() {
    let mut hessian = Hessian::new(32);
    assert_eq!(
        hessian.add(&[0.0; 33]),
        Err(QuantError::Rows { k: 32, found: 33 })
    );
    hessian.add(&[1.0; 64]).unwrap();
    let mut rows = vec![0.5; 64];
    rows[40] = f32::INFINITY;
    assert_eq!(
        hessian.add(&rows),
        Err(QuantError::NonFiniteActivation {
            row: 3,
            feature: 8,
            value: f32::INFINITY
        })
    );
    assert_eq!(
        (hessian.tokens(), hessian.get(0, 31)),
        (2, 2.0),
        "nothing of it was added"
    );
    let spec = QuantSpec::int4(GroupSize::G32);
    let run = |weight: &[f32], n| gptq(weight, n, &hessian, &spec, &GptqOptions::default());
    assert_eq!(
        run(&[0.0; 63], 2),
        Err(QuantError::Shape {
            k: 32,
            n: 2,
            found: 63
        })
    );
    let mut weight = vec![0.5; 64];
    weight[9] = f32::NAN;
    assert!(matches!(
        run(&weight, 2),
        Err(QuantError::Format(FormatError::NonFiniteWeight {
            row: 4,
            column: 1,
            ..
        }))
    ));
    let sparse = |order, hessian: &Hessian| {
        let options = GptqOptions {
            order,
            sparsity: Sparsity::TwoFour,
            ..GptqOptions::default()
        };
        gptq(
            &vec![0.5; hessian.features() * 2],
            2,
            hessian,
            &spec,
            &options,
        )
    };
    assert_eq!(
        sparse(RowOrder::ActOrder, &hessian),
        Err(FormatError::SparsePermuted.into())
    );
    assert_eq!(
        sparse(RowOrder::Natural, &Hessian::new(34)),
        Err(FormatError::SparseRows { k: 34 }.into())
    );
    weight[9] = 1e30;
    assert!(matches!(
        run(&weight, 2),
        Err(QuantError::Format(FormatError::ScaleOverflow {
            column: 1,
            ..
        }))
    ));
}
