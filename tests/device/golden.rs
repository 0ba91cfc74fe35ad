//! Weights of `tests/golden` on the device, written by the packers of each format. The README of
//! the folder describes how the weights are made.

use crate::setup::{Named, computes, float_dtype, trial};
use burn::tensor::{Device, Distribution, Tensor};
use burn_marlin::QuantizedWeight;
use libtest_mimic::Trial;
use marlin_format::PlainWeight;
use marlin_format::checkpoint::{Checkpoint, LayerFormat, Quantization, read_layer};
use marlin_kernels::{ActivationDtype, Prologue};
use marlin_testing::{GoldenFolder, relative_error_of_terms};
use marlin_tests::tolerance;
use std::collections::BTreeMap;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(
        device,
        "golden::every_format_comes_back_from_the_device",
        comes_back,
    ));
    tests.push(trial(
        device,
        "golden::every_format_multiplies_as_f64_does",
        multiplies,
    ));
}

/// Reads the first layer of each format and shape in each folder, by name.
fn weights() -> BTreeMap<String, PlainWeight> {
    let must = |error: &dyn std::fmt::Display| -> ! { panic!("{error}") };
    let mut weights = BTreeMap::new();
    for golden in GoldenFolder::all() {
        let (name, dir) = (&golden.name, golden.dir());
        let Some(quantization) = Quantization::read(&dir).unwrap_or_else(|error| must(&error))
        else {
            continue;
        };
        let checkpoint = Checkpoint::open(&dir).unwrap_or_else(|error| must(&error));
        for layer in golden.layers.keys() {
            let format = quantization
                .layer(layer)
                .unwrap_or_else(|error| must(&error));
            assert!(format != LayerFormat::Float, "{name}: {layer}");
            let weight =
                read_layer(&checkpoint, layer, &format).unwrap_or_else(|error| must(&error));
            weights
                .entry(format!("{name}: {format}, {} x {}", weight.k(), weight.n()))
                .or_insert(weight);
        }
    }
    assert!(weights.len() > 80, "{} weights", weights.len());
    weights
}

fn comes_back(device: &Device) {
    for (name, weight) in weights() {
        let found = QuantizedWeight::from_plain(&weight, device)
            .to_plain()
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        // Devices without sparse tensor cores store a 2:4 weight as dense.
        assert!(
            found.to_dense() == weight.to_dense(),
            "{name}: the device gives another weight"
        );
    }
}

fn multiplies(device: &Device) {
    let rows = 3;
    for (name, weight) in weights() {
        let (k, n) = (weight.k(), weight.n());
        let dtype = ActivationDtype::from(weight.spec().scales.dtype);
        if !computes(device, dtype) {
            continue;
        }
        let x = Tensor::<2>::random([rows, k], Distribution::Normal(0.0, 1.0), device)
            .cast(float_dtype(dtype));
        let values = |tensor: Tensor<2>| {
            let data = tensor.into_data().convert::<f64>();
            data.try_into_vec::<f64>()
                .unwrap_or_else(|error| panic!("{name}: {error:?}"))
        };
        let floats = weight.dequantize();
        let weight = QuantizedWeight::from_plain(&weight, device);
        let found = values(weight.matmul(x.clone()));
        let x = values(x);
        let mut expected = vec![0.0; rows * n];
        let mut magnitude = vec![0.0; rows * n];
        for (index, &weight) in floats.iter().enumerate() {
            for row in 0..rows {
                let product = x[row * k + index / n] * f64::from(weight);
                expected[row * n + index % n] += product;
                magnitude[row * n + index % n] += product.abs();
            }
        }
        let error = relative_error_of_terms(&found, &expected, &magnitude);
        let broken: Vec<usize> = (0..found.len())
            .filter(|&i| !found[i].is_finite())
            .collect();
        let plan = weight.plan(rows, dtype, Prologue::None);
        assert!(
            error <= tolerance(dtype),
            "{name}, {}: {plan}: relative error {error:e}; {} of {} values not finite, the first at {:?}",
            weight.descriptor(),
            broken.len(),
            found.len(),
            broken.first()
        );
    }
}
