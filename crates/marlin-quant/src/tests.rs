use crate::{GptqOptions, Hessian, HessianSums, QuantError, Quantizer, RowOrder, gptq, gptq_beside, round_with_clipping};
use burn::tensor::{Device, Tensor, TensorData};
use marlin_format::{
    FormatError, GroupSize, PlainWeight, QuantSpec, ScaleDtype, Sparsity, check_two_four, prune_two_four, quantize_rtn, quantize_two_four,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

#[path = "../../../tests/src/seed.rs"]
mod seed;

pub(crate) fn generator() -> StdRng {
    StdRng::seed_from_u64(seed::seed())
}

pub(crate) fn random(count: usize, rng: &mut StdRng) -> Vec<f32> {
    (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// Activations [tokens, K] like those of a model: a few directions that most features share, features of very different size, and noise.
pub(crate) fn activations(tokens: usize, k: usize, rng: &mut StdRng) -> Vec<f32> {
    let directions = k / 4 + 1;
    let (mix, sizes) = (random(directions * k, rng), random(k, rng));
    let mut rows = Vec::with_capacity(tokens * k);
    for _ in 0..tokens {
        let (strengths, noise) = (random(directions, rng), random(k, rng));
        rows.extend((0..k).map(|feature| {
            let shared: f32 = strengths.iter().enumerate().map(|(i, strength)| strength * mix[i * k + feature]).sum();
            (3.0 * sizes[feature]).exp() * (shared + 0.3 * noise[feature])
        }));
    }
    rows
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

/// The squared error of all outputs, from the definition.
pub(crate) fn output_error_of(weight: &[f32], quantized: &[f32], hessian: &Hessian) -> f64 {
    let (k, n) = (hessian.features(), weight.len() / hessian.features());
    let errors: Vec<f64> = weight.iter().zip(quantized).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
    let of_column = |column: usize| {
        let products = (0..k).flat_map(|i| (0..k).map(move |j| (i, j)));
        products.map(|(i, j)| errors[i * n + column] * hessian.get(i, j) * errors[j * n + column]).sum::<f64>()
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

/// Inverts a matrix by Gauss-Jordan elimination.
fn inverse(k: usize, mut matrix: Vec<f64>) -> Vec<f64> {
    let mut inverse: Vec<f64> = (0..k * k).map(|i| f64::from(u8::from(i / k == i % k))).collect();
    for pivot in 0..k {
        let value = matrix[pivot * k + pivot];
        for column in 0..k {
            matrix[pivot * k + column] /= value;
            inverse[pivot * k + column] /= value;
        }
        for row in (0..k).filter(|&row| row != pivot) {
            let factor = matrix[row * k + pivot];
            for column in 0..k {
                matrix[row * k + column] -= factor * matrix[pivot * k + column];
                inverse[row * k + column] -= factor * inverse[pivot * k + column];
            }
        }
    }
    inverse
}

/// GPTQ's equations 2 and 3 as they stand, feature after feature with an inverse that shrinks, on the grids of a weight that was quantised in natural order.
fn reference(weight: &[f32], hessian: &Hessian, damping: f64, found: &PlainWeight) -> Vec<u8> {
    let (k, n, spec) = (found.k(), found.n(), found.spec());
    let mean = hessian.diagonal().iter().sum::<f64>() / k as f64;
    let damped = (0..k * k).map(|i| hessian.get(i / k, i % k) + if i / k == i % k { damping * mean } else { 0.0 }).collect();
    let mut inverse = inverse(k, damped);
    let mut rows: Vec<f64> = weight.iter().copied().map(f64::from).collect();
    let mut codes = Vec::with_capacity(k * n);
    for i in 0..k {
        let diagonal = inverse[i * k + i];
        for column in 0..n {
            let group = i / spec.group.rows(k) * n + column;
            let scale = f64::from(found.scales().get(group));
            let zero = f64::from(found.zero_points().map_or(spec.bits.midpoint(), |zeros| zeros[group]));
            let q = ((rows[i * n + column] / scale).round_ties_even() + zero).clamp(0.0, f64::from(spec.bits.max()));
            codes.push(q as u8);
            let error = (rows[i * n + column] - (q - zero) * scale) / diagonal;
            for j in i + 1..k {
                rows[j * n + column] -= error * inverse[j * k + i];
            }
        }
        let column: Vec<f64> = (0..k).map(|j| inverse[j * k + i]).collect();
        for a in i + 1..k {
            for b in i + 1..k {
                inverse[a * k + b] -= column[a] * column[b] / diagonal;
            }
        }
    }
    codes
}

#[test]
fn codes_are_those_of_the_equations() {
    let mut rng = generator();
    for spec in SPECS {
        for [k, n] in [[160, 70], [64, 3], [33, 9]] {
            let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
            let options = GptqOptions { order: RowOrder::Natural, ..GptqOptions::default() };
            let found = gptq(&weight, n, &hessian, &spec, &options).unwrap();
            let expected = reference(&weight, &hessian, found.damping, &found.weight);
            let differ = (0..k * n).filter(|i| found.weight.q(i / n, i % n) != expected[*i]).count();
            // f32 takes a value that lies between two levels to the other now and then, and the values after it follow.
            assert!(differ * 50 <= k * n, "{spec} [{k}, {n}]: {differ} of {} codes differ", k * n);
        }
    }
}

#[test]
fn the_loss_is_that_of_the_outputs() {
    let mut rng = generator();
    let (k, n) = (96, 40);
    let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
    let options = GptqOptions { damping: 1e-7, ..GptqOptions::default() };
    let found = gptq(&weight, n, &hessian, &SPECS[0], &options).unwrap();
    let expected = output_error(&weight, &found.weight, &hessian) / hessian.tokens() as f64;
    assert!((found.loss() / expected - 1.0).abs() < 0.02, "{} of {expected}", found.loss());
}

#[test]
fn outputs_are_nearer_than_those_of_rounding() {
    let mut rng = generator();
    for spec in SPECS {
        let (k, n) = (256, 48);
        let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
        let error = |quantized: &PlainWeight| output_error(&weight, quantized, &hessian);
        let rounded = error(&quantize_rtn(&weight, k, n, &spec).unwrap());
        let clipped = error(&round_with_clipping(&weight, k, n, &spec, Sparsity::Dense).unwrap());
        let of_order = |order| {
            let found = gptq(&weight, n, &hessian, &spec, &GptqOptions { order, ..GptqOptions::default() }).unwrap();
            assert_eq!(found.weight.row_permutation().is_some(), order == RowOrder::ActOrder);
            error(&found.weight)
        };
        let orders = [RowOrder::Natural, RowOrder::ActOrder, RowOrder::WithinGroups].map(of_order);
        println!("{spec}: rounded {rounded:.3}, clipped {clipped:.3}, GPTQ {orders:.3?}");
        assert!(orders.iter().all(|&error| error < 0.6 * rounded.min(clipped)), "{spec}: {orders:?} of {rounded} and {clipped}");
    }
}

#[test]
fn clipping_leaves_no_larger_error_than_the_whole_range() {
    let mut rng = generator();
    for spec in SPECS {
        let (k, n) = (200, 17);
        let mut weight = random(k * n, &mut rng);
        // Outliers, which are what clipping is for.
        weight.iter_mut().step_by(97).for_each(|value| *value *= 3.0);
        let error = |quantized: PlainWeight| {
            let differences = weight.iter().zip(quantized.dequantize()).map(|(a, b)| f64::from(a - b).powi(2));
            differences.sum::<f64>()
        };
        let (whole, clipped) = (
            error(quantize_rtn(&weight, k, n, &spec).unwrap()),
            error(round_with_clipping(&weight, k, n, &spec, Sparsity::Dense).unwrap()),
        );
        assert!(clipped <= whole * (1.0 + 1e-9), "{spec}: {clipped} of {whole}");
    }
}

#[test]
fn dead_features_are_rounded_and_counted() {
    let mut rng = generator();
    let (k, n, spec) = (64, 8, SPECS[0]);
    let weight = random(k * n, &mut rng);
    let mut rows = activations(100, k, &mut rng);
    let dead = [3, 31, 40];
    rows.chunks_exact_mut(k).for_each(|row| dead.iter().for_each(|&feature| row[feature] = 0.0));
    let mut hessian = Hessian::new(k);
    hessian.add(&rows).unwrap();
    let found = gptq(&weight, n, &hessian, &spec, &GptqOptions::default()).unwrap();
    assert_eq!(found.dead, dead.len());
    for (row, column) in dead.into_iter().flat_map(|row| (0..n).map(move |column| (row, column))) {
        let scale = found.weight.scales().get(row / 32 * n + column);
        let nearest = ((weight[row * n + column] / scale).round_ties_even() + 8.0).clamp(0.0, 15.0);
        assert_eq!(f32::from(found.weight.q(row, column)), nearest, "row {row}, column {column}");
    }
    // A layer that saw nothing.
    let found = gptq(&weight, n, &Hessian::new(k), &spec, &GptqOptions::default()).unwrap();
    assert_eq!((found.dead, found.loss()), (k, 0.0));
}

#[test]
fn damping_grows_where_features_depend_on_each_other() {
    let mut rng = generator();
    let (k, n) = (48, 4);
    let weight = random(k * n, &mut rng);
    let mut hessian = Hessian::new(k);
    // Fewer tokens than features.
    hessian.add(&activations(5, k, &mut rng)).unwrap();
    let found = gptq(&weight, n, &hessian, &SPECS[0], &GptqOptions { damping: 0.0, ..GptqOptions::default() }).unwrap();
    assert!(found.damping > 0.0 && found.loss().is_finite(), "damping {:e}, loss {}", found.damping, found.loss());
}

#[test]
fn the_same_arguments_give_the_same_weight() {
    let mut rng = generator();
    let (k, n) = (128, 200);
    let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
    let run = || gptq(&weight, n, &hessian, &SPECS[1], &GptqOptions::default()).unwrap();
    let first = run();
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    assert_eq!(one_thread.install(run), first);
}

#[test]
fn sparsegpt_prunes_with_less_error_than_magnitude() {
    let mut rng = generator();
    for spec in SPECS {
        let (k, n) = (256, 70);
        let (weight, hessian) = (random(k * n, &mut rng), hessian(k, &mut rng));
        let magnitude = output_error(&weight, &quantize_two_four(weight.clone(), k, n, &spec).unwrap(), &hessian);
        for order in [RowOrder::Natural, RowOrder::WithinGroups] {
            let options = GptqOptions { order, sparsity: Sparsity::TwoFour, ..GptqOptions::default() };
            let found = gptq(&weight, n, &hessian, &spec, &options).unwrap();
            assert_eq!(found.weight.sparsity(), Sparsity::TwoFour);
            check_two_four(&found.weight.dequantize(), k, n).unwrap();
            let error = output_error(&weight, &found.weight, &hessian);
            println!("{spec} {order:?}: SparseGPT {error:.3}, magnitude {magnitude:.3}");
            assert!(error < 0.6 * magnitude, "{spec} {order:?}: {error} of {magnitude}");
        }
    }
}

#[test]
fn weights_that_are_two_four_stay_so() {
    let mut rng = generator();
    let (k, n, spec) = (128, 70, SPECS[0]);
    let hessian = hessian(k, &mut rng);
    let mut weight = random(k * n, &mut rng);
    prune_two_four(&mut weight, k, n).unwrap();
    for sparsity in [Sparsity::Dense, Sparsity::TwoFour] {
        let found = gptq(&weight, n, &hessian, &spec, &GptqOptions { sparsity, ..GptqOptions::default() }).unwrap().weight;
        assert_eq!(found.sparsity(), Sparsity::TwoFour);
        let values = found.dequantize();
        assert!(weight.iter().zip(&values).all(|(before, after)| *before != 0.0 || *after == 0.0));
        let rounded = quantize_rtn(&weight, k, n, &spec).unwrap();
        assert!(output_error(&weight, &found, &hessian) < 0.6 * output_error(&weight, &rounded, &hessian));
    }
}

#[test]
fn the_devices_sums_are_those_of_the_host() {
    let mut rng = generator();
    let (k, device) = (40, Device::flex());
    let (mut host, mut sums) = (Hessian::new(k), HessianSums::new(k, &device));
    for tokens in [70, 1, 33] {
        let rows = activations(tokens, k, &mut rng);
        host.add(&rows).unwrap();
        sums.add(Tensor::from_data(TensorData::new(rows, [tokens, k]), &device)).unwrap();
    }
    let found = sums.hessian().unwrap();
    assert_eq!((found.tokens(), found.features()), (104, k));
    let size = |i: usize, j: usize| (host.get(i, i) * host.get(j, j)).sqrt();
    for (i, j) in (0..k).flat_map(|i| (0..k).map(move |j| (i, j))) {
        assert!((found.get(i, j) - host.get(i, j)).abs() <= 1e-5 * size(i, j), "[{i}, {j}]: {} of {}", found.get(i, j), host.get(i, j));
    }
    let mut sums = HessianSums::new(2, &device);
    sums.add(Tensor::from_data([[1.0, 2.0]], &device)).unwrap();
    sums.add(Tensor::from_data([[1.0, f32::NAN]], &device)).unwrap();
    // Batches are checked when there are sixteen, or the sums are used.
    let refused = QuantError::NonFiniteBatch { batch: 1 };
    assert_eq!(sums.hessian(), Err(refused.clone()));
    let mut add = || sums.add(Tensor::from_data([[1.0, 2.0]], &device));
    for _ in 2..15 {
        add().unwrap();
    }
    assert_eq!(add(), Err(refused));
}

pub(crate) fn tensor(values: Vec<f32>, columns: usize) -> Tensor<2> {
    let rows = values.len() / columns;
    Tensor::from_data(TensorData::new(values, [rows, columns]), &Device::flex())
}

/// With a float model's inputs beside those that a layer has, and a residual that its outputs have to make up for: outputs are nearer to the float model's.
#[test]
fn outputs_make_up_for_inputs_that_are_off() {
    let mut rng = generator();
    let (k, n, tokens) = (64, 20, 400);
    let (weight, float) = (random(k * n, &mut rng), activations(tokens, k, &mut rng));
    let float = tensor(float, k);
    // A part of the inputs' error, and of the residual, that can be made up for.
    let (mix, matrix) = (tensor(random(k * k, &mut rng), k), tensor(random(k * n, &mut rng), n));
    let noise = tensor((0..tokens * k).map(|_| rng.random_range(0.98..1.02)).collect(), k);
    let x = (float.clone() + float.clone().matmul(mix).mul_scalar(0.02)) * noise;
    let residual = x.clone().matmul(matrix.clone()).mul_scalar(0.2);
    let weights = tensor(weight.clone(), n);
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
                true => sums.add_with_residual(x.clone(), part(&expected) - x.matmul(weights.clone())).unwrap(),
                false => sums.add_beside(x, part(&float)).unwrap(),
            }
        }
        let error_at = |correction| {
            let options = GptqOptions { correction, ..GptqOptions::default() };
            let found = gptq_beside(&weight, n, &sums, &SPECS[0], &options).unwrap();
            let errors = x.clone().matmul(tensor(found.weight.dequantize(), n)) - expected.clone();
            f64::from(errors.square().sum().into_scalar::<f32>())
        };
        let [none, half, all] = [0.0, 0.5, 1.0].map(error_at);
        println!("{none} without correction, {half} with half of it, {all} with all of it");
        // What quantisation itself costs stays.
        assert!(half < 0.6 * none && all < 0.8 * half, "residual {with_residual}: {none}, {half}, {all}");
    }
}

/// Levels reach one further below zero than above it: with either sign of the scale, to the side that needs it.
#[test]
fn scales_have_the_sign_that_fits() {
    let (k, n) = (32, 2);
    // Column 0 is 7 of 15 levels up to +8, column 1 its negative.
    let weight: Vec<f32> = (0..k).flat_map(|row| [(row % 16) as f32 - 7.0, 7.0 - (row % 16) as f32]).collect();
    let spec = QuantSpec::int4(GroupSize::G32);
    let exact = round_with_clipping(&weight, k, n, &spec, Sparsity::Dense).unwrap();
    let error: f32 = weight.iter().zip(exact.dequantize()).map(|(a, b)| (a - b).powi(2)).sum();
    assert!(exact.scales().get(0) < 0.0 && exact.scales().get(1) > 0.0);
    let rounded = quantize_rtn(&weight, k, n, &spec).unwrap();
    let plain: f32 = weight.iter().zip(rounded.dequantize()).map(|(a, b)| (a - b).powi(2)).sum();
    assert!(error < 0.5 * plain, "{error} of {plain}");
}

#[test]
fn layers_that_saw_little_are_rounded() {
    let mut rng = generator();
    let (k, n, spec) = (64, 8, SPECS[0]);
    let weight = random(k * n, &mut rng);
    for tokens in [127, 128] {
        let mut sums = HessianSums::new(k, &Device::flex());
        sums.add(tensor(activations(tokens, k, &mut rng), k)).unwrap();
        let found = GptqOptions::default().quantize(&weight, k, n, Some(&sums), &spec).unwrap();
        assert_eq!((found.fell_back, found.losses.is_some()), (tokens < 128, tokens >= 128));
        if found.fell_back {
            assert_eq!(found.weight, round_with_clipping(&weight, k, n, &spec, Sparsity::Dense).unwrap());
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let mut hessian = Hessian::new(32);
    assert_eq!(hessian.add(&[0.0; 33]), Err(QuantError::Rows { k: 32, found: 33 }));
    hessian.add(&[1.0; 64]).unwrap();
    let mut rows = vec![0.5; 64];
    rows[40] = f32::INFINITY;
    assert_eq!(hessian.add(&rows), Err(QuantError::NonFiniteActivation { row: 3, feature: 8, value: f32::INFINITY }));
    assert_eq!((hessian.tokens(), hessian.get(0, 31)), (2, 2.0), "nothing of it was added");
    let spec = QuantSpec::int4(GroupSize::G32);
    let run = |weight: &[f32], n| gptq(weight, n, &hessian, &spec, &GptqOptions::default());
    assert_eq!(run(&[0.0; 63], 2), Err(QuantError::Shape { k: 32, n: 2, found: 63 }));
    let mut weight = vec![0.5; 64];
    weight[9] = f32::NAN;
    assert!(matches!(run(&weight, 2), Err(QuantError::Format(FormatError::NonFiniteWeight { row: 4, column: 1, .. }))));
    let sparse = |order, hessian: &Hessian| {
        let options = GptqOptions { order, sparsity: Sparsity::TwoFour, ..GptqOptions::default() };
        gptq(&vec![0.5; hessian.features() * 2], 2, hessian, &spec, &options)
    };
    assert_eq!(sparse(RowOrder::ActOrder, &hessian), Err(FormatError::SparsePermuted.into()));
    assert_eq!(sparse(RowOrder::Natural, &Hessian::new(34)), Err(FormatError::SparseRows { k: 34 }.into()));
    weight[9] = 1e30;
    assert!(matches!(run(&weight, 2), Err(QuantError::Format(FormatError::ScaleOverflow { column: 1, .. }))));
}
