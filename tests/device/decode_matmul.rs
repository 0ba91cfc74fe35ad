//! The matmuls of a prompt's attention and of float layers, compared with f64.

use crate::layer::{tensor, values};
use crate::setup::{Named, computes, trial};
use burn::tensor::{Device, Tensor};
use libtest_mimic::Trial;
use marlin_kernels::ActivationDtype::{BF16, F16};
use marlin_nn as decode;
use marlin_testing::{random_values, relative_error, relative_error_of_terms, rms_norm};
use marlin_tests::tolerance;
use rand::SeedableRng;
use rand::rngs::StdRng;

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    // CubeCL's CPU runtime takes minutes to compile Burn's matmul for each shape.
    if device.name != "cpu" {
        tests.push(trial(
            device,
            "decode::matmul_agrees_with_f64",
            move |device| products(device, seed),
        ));
        // Burn's matmul on Flex rounds sums to 16 bits.
        if device.name != "flex" {
            tests.push(trial(
                device,
                "decode::linear_agrees_with_f64",
                move |device| linears(device, seed),
            ));
            tests.push(trial(
                device,
                "decode::linear_after_a_norm_agrees_with_f64",
                move |device| norm_linears(device, seed),
            ));
        }
    }
}

/// The heads, rows, used positions of the cache, and features of a head. The shapes cover prompts
/// of one token, of odd lengths, of one chunk and of several. Heads of several queries are stacked
/// to numbers of rows that are not powers of two. Heads have every size that models have.
const SHAPES: [[usize; 4]; 12] = [
    [1, 1, 1, 64],
    [4, 7, 9, 128],
    [8, 63, 63, 128],
    [8, 63, 63, 64],
    [4, 504, 63, 128],
    [8, 252, 20, 128],
    [2, 28, 130, 64],
    [1, 512, 200, 128],
    [1, 65, 513, 64],
    [4, 33, 70, 80],
    [4, 100, 40, 96],
    [2, 33, 129, 256],
];

fn products(device: &Device, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    for dtype in [F16, BF16]
        .into_iter()
        .filter(|&dtype| computes(device, dtype))
    {
        for [heads, rows, positions, head_dim] in SHAPES {
            let what = format!(
                "{heads} heads, {rows} rows, {positions} positions of {head_dim} in {dtype}, seed {seed}"
            );
            let mut random = |shape: [usize; 4]| {
                let values = random_values(shape.iter().product(), 1.0, &mut rng);
                tensor(&values, shape, dtype, device)
            };
            // The keys are a view of a larger cache, as in attention.
            let keys = random([1, heads, positions + 24, head_dim]).slice([
                0..1,
                0..heads,
                0..positions,
                0..head_dim,
            ]);
            let (queries, weights) = (
                random([1, heads, rows, head_dim]),
                random([1, heads, rows, positions]),
            );
            let scores = decode::matmul(queries.clone(), keys.clone().swap_dims(2, 3));
            let mixed = decode::matmul(weights.clone(), keys.clone());
            assert_eq!(
                (scores.dims(), mixed.dims()),
                ([1, heads, rows, positions], [1, heads, rows, head_dim]),
                "{what}"
            );
            let [queries, weights, keys, scores, mixed] =
                [queries, weights, keys, scores, mixed].map(values);
            let product = |lhs: &[f64],
                           [inner, outer]: [usize; 2],
                           rhs: &dyn Fn(usize, usize, usize) -> f64|
             -> [Vec<f64>; 2] {
                let mut sums = [Vec::new(), Vec::new()];
                for place in 0..heads * rows * outer {
                    let (row, column) = (place / outer, place % outer);
                    let terms =
                        (0..inner).map(|i| lhs[row * inner + i] * rhs(row / rows, i, column));
                    let [sum, norm] = sum_of(terms);
                    sums[0].push(sum);
                    sums[1].push(norm);
                }
                sums
            };
            let key = |head: usize, position: usize, feature: usize| {
                keys[(head * positions + position) * head_dim + feature]
            };
            let [expected, magnitude] =
                product(&queries, [head_dim, positions], &|head, i, column| {
                    key(head, column, i)
                });
            let error = relative_error_of_terms(&scores, &expected, &magnitude);
            assert!(
                error <= tolerance(dtype),
                "scores of {what}: relative error {error:e}"
            );
            let [expected, magnitude] =
                product(&weights, [positions, head_dim], &|head, i, column| {
                    key(head, i, column)
                });
            let error = relative_error_of_terms(&mixed, &expected, &magnitude);
            assert!(
                error <= tolerance(dtype),
                "weighted values of {what}: relative error {error:e}"
            );
        }
    }
}

/// The rows, K and N of layers. The numbers of rows lie on both sides of the maximum of the lm_head
/// kernel. Some sizes are not multiples of a tile, and some rows of weights and activations have a
/// number of bytes that is not a multiple of 16.
const LAYERS: [[usize; 3]; 14] = [
    [1, 256, 512],
    [1, 8, 1],
    [1, 2880, 33],
    [1, 4104, 130],
    [1, 8200, 16],
    [4, 2880, 32],
    [32, 256, 70],
    [33, 256, 70],
    [64, 512, 384],
    [100, 257, 64],
    [129, 96, 1027],
    [200, 136, 259],
    [1024, 128, 130],
    [70, 2050, 12],
];

fn linears(device: &Device, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    for dtype in [F16, BF16]
        .into_iter()
        .filter(|&dtype| computes(device, dtype))
    {
        for ([rows, k, n], is_table) in LAYERS
            .into_iter()
            .flat_map(|layer| [(layer, true), (layer, false)])
        {
            let what = format!(
                "{rows} rows, [{k}, {n}], as in checkpoints: {is_table}, in {dtype}, seed {seed}"
            );
            let mut random = |shape: [usize; 2]| {
                let values = random_values(shape.iter().product(), 1.0, &mut rng);
                tensor(&values, shape, dtype, device)
            };
            let x = random([rows, k]);
            let weight = if is_table {
                random([n, k]).transpose()
            } else {
                random([k, n])
            };
            let bias: Tensor<1> = random([1, n]).reshape([n]);
            // Layers as in checkpoints have a bias.
            let of_layer = is_table.then(|| bias.clone());
            let out: Tensor<3> = decode::linear(x.clone().unsqueeze(), weight.clone(), of_layer);
            assert_eq!(out.dims(), [1, rows, n], "{what}");
            let [x, weight, out] = [values(x), values(weight), values(out)];
            let bias = values(bias);
            let (mut expected, mut magnitude) = (Vec::new(), Vec::new());
            for (row, column) in (0..rows).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let terms = (0..k).map(|i| x[row * k + i] * weight[i * n + column]);
                let [sum, norm] = sum_of(terms.chain(is_table.then_some(bias[column])));
                expected.push(sum);
                magnitude.push(norm);
            }
            let error = relative_error_of_terms(&out, &expected, &magnitude);
            assert!(
                error <= tolerance(dtype),
                "{what}: relative error {error:e}"
            );
        }
    }
}

/// Checks a layer after an addition to the residual stream and a norm, and the norm and the sum
/// that it returns.
fn norm_linears(device: &Device, seed: u64) {
    const EPSILON: f64 = 1e-3;
    let mut rng = StdRng::seed_from_u64(seed);
    for dtype in [F16, BF16]
        .into_iter()
        .filter(|&dtype| computes(device, dtype))
    {
        for ([rows, k, n], has_bias) in [
            ([1, 2048, 128], false),
            ([1, 2880, 32], true),
            ([1, 8, 1], true),
            ([1, 3072, 70], false),
            ([1, 8192, 9], true),
            ([1, 8200, 9], false),
            ([1, 520, 5000], true),
            ([3, 2880, 32], true),
            ([9, 256, 300], true),
        ] {
            let what =
                format!("{rows} rows, [{k}, {n}], bias: {has_bias}, in {dtype}, seed {seed}");
            let mut random = |shape: [usize; 2]| {
                let values = random_values(shape.iter().product(), 1.0, &mut rng);
                tensor(&values, shape, dtype, device)
            };
            let (x, residual, weight) = (random([rows, k]), random([rows, k]), random([n, k]));
            let norm: Tensor<1> = random([1, k]).reshape([k]);
            let bias: Tensor<1> = random([1, n]).reshape([n]);
            let (out, normalised, sum) = decode::norm_float_linear(
                x.clone(),
                residual.clone(),
                norm.clone(),
                EPSILON,
                weight.clone().transpose(),
                has_bias.then(|| bias.clone()),
            );
            assert_eq!(
                (out.dims(), normalised.dims(), sum.dims()),
                ([rows, n], [rows, k], [rows, k]),
                "{what}"
            );
            let added = values(x.clone() + residual.clone());
            assert_eq!(values(sum), added, "the sum of {what}");
            let [out, normalised, weight] = [out, normalised, weight].map(values);
            let [norm, bias] = [norm, bias].map(values);
            let (mut expected, mut magnitude, mut of_norm) = (Vec::new(), Vec::new(), Vec::new());
            for row in added.chunks(k) {
                let row = rms_norm(row, &norm, EPSILON);
                for (column, weight) in weight.chunks(k).enumerate() {
                    let terms = row.iter().zip(weight).map(|(x, weight)| x * weight);
                    let [sum, norm] = sum_of(terms.chain(has_bias.then_some(bias[column])));
                    expected.push(sum);
                    magnitude.push(norm);
                }
                of_norm.extend(row);
            }
            // The norm is rounded before and after the multiplication by its weight.
            let error = relative_error(&normalised, &of_norm);
            assert!(
                error <= 2.0 * tolerance(dtype),
                "the norm of {what}: relative error {error:e}"
            );
            let error = relative_error_of_terms(&out, &expected, &magnitude);
            assert!(
                error <= 2.0 * tolerance(dtype),
                "{what}: relative error {error:e}"
            );
        }
    }
}

/// Returns the sum of a product's terms, and the magnitude that errors are relative to: the square
/// root of the sum of the terms' squares, or the sum itself if that is larger, because the output
/// is rounded relative to it.
fn sum_of(terms: impl Iterator<Item = f64>) -> [f64; 2] {
    let [sum, squares] = terms.fold([0.0, 0.0], |[sum, squares], term| {
        [sum + term, squares + term * term]
    });
    [sum, squares.sqrt().max(sum.abs())]
}
