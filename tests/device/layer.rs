//! `QuantizedWeight` and `QuantLinear` on Burn's tensors.

mod activations;
mod records;
mod tile_layout;

use crate::setup::{Named, computes, float_dtype, slow_on_cpu_runtime, trial};
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, TensorData};
use burn_marlin::{GroupSize, QuantLinear, QuantSpec, QuantizedWeight};
use libtest_mimic::Trial;
use marlin_format::{Sparsity, WeightLayout};
use marlin_kernels::{ActivationDtype, Prologue};
use marlin_testing::{relative_error, relative_error_of_terms};
use marlin_tests::{Case, Operands, cases, runs_on_tensor_cores, tolerance};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    tests.push(trial(
        device,
        "layer::forward_agrees_with_f64",
        move |device| forward_agrees(device, seed),
    ));
    // CubeCL's CPU runtime has no kernel of norm and matmul in one: both have tests of their own.
    tests.push(slow_on_cpu_runtime(
        device,
        "layer::a_norm_in_front_agrees_with_f64",
        move |device| activations::norm_in_front(device, seed),
    ));
    tests.push(trial(
        device,
        "layer::forward_takes_any_rank",
        move |device| activations::any_rank(device, seed),
    ));
    tests.push(trial(
        device,
        "layer::activations_may_start_anywhere",
        move |device| activations::unaligned(device, seed),
    ));
    tests.push(trial(
        device,
        "layer::threads_do_not_disturb_each_other",
        move |device| threads(device, seed),
    ));
    tests.push(trial(
        device,
        "layer::half_precision_runs_on_tensor_cores_where_there_are",
        move |device| plans(device, seed),
    ));
    if device.name != "flex" {
        tests.push(trial(
            device,
            "layer::the_tile_layout_serves_every_dtype",
            move |device| tile_layout::tile_layout(device, seed),
        ));
    }
    tests.push(trial(
        device,
        "layer::from_linear_keeps_the_bias",
        from_linear,
    ));
    tests.push(trial(
        device,
        "layer::weight_survives_device_and_record",
        move |device| records::round_trips(device, seed),
    ));
    tests.push(trial(
        device,
        "layer::a_record_is_taken_in_its_own_format",
        move |device| records::other_format(device, seed),
    ));
    tests.push(trial(
        device,
        "layer::gradient_reaches_the_activations_alone",
        move |device| gradient(device, seed),
    ));
    tests.push(trial(device, "layer::display_shows_true_sizes", display));
    tests.push(trial(device, "layer::no_float_copy_is_held", held_bytes));
    tests.push(trial(
        device,
        "layer::random_weights_lie_around_zero",
        random_weights,
    ));
}

pub fn tensor<const D: usize>(
    values: &[f32],
    shape: [usize; D],
    dtype: ActivationDtype,
    device: &Device,
) -> Tensor<D> {
    Tensor::from_data(
        TensorData::new(values.to_vec(), shape),
        (device, DType::from(float_dtype(dtype))),
    )
}

pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor
        .into_data()
        .convert::<f64>()
        .try_into_vec::<f64>()
        .unwrap_or_else(|error| panic!("{error:?}"))
}

fn layer(case: &Case, operands: &Operands, device: &Device) -> QuantLinear {
    let bias = tensor(&operands.bias, [case.n], case.activations, device);
    QuantLinear::new(
        QuantizedWeight::from_plain(&operands.weight, device),
        Some(bias),
    )
    .unwrap_or_else(|error| panic!("{case}: {error}"))
}

fn check(case: &Case, seed: u64, found: &[f64], operands: &Operands) {
    let error = relative_error_of_terms(found, &operands.expected, &operands.magnitude);
    assert!(
        error <= tolerance(case.activations),
        "{case}, seed {seed}: relative error {error:e}"
    );
}

fn forward_agrees(device: &Device, seed: u64) {
    let mut ran = 0;
    for case in cases()
        .iter()
        .filter(|case| computes(device, case.activations))
    {
        let operands = Operands::random(case, seed);
        let x = tensor(&operands.x, [case.m, case.k], case.activations, device);
        let y = layer(case, &operands, device).forward(x);
        assert_eq!(
            y.dtype(),
            DType::from(float_dtype(case.activations)),
            "{case}"
        );
        check(case, seed, &values(y), &operands);
        ran += 1;
    }
    assert!(ran > 0, "no case has a dtype that this device supports");
}

/// Checks the mean and the standard deviation of random weights. With other values, a model of many
/// layers would leave the range of f16.
fn random_weights(device: &Device) {
    for spec in [
        QuantSpec::int4(GroupSize::G128),
        QuantSpec::int4(GroupSize::G32).with_zero_points(),
        QuantSpec::int8(GroupSize::Channel),
    ] {
        let weight = QuantizedWeight::random(512, 1024, spec, ActivationDtype::F32, device)
            .unwrap_or_else(|error| panic!("{spec}: {error}"));
        let weights = values(weight.dequantize(FloatDType::F32));
        let count = weights.len() as f64;
        let mean = weights.iter().sum::<f64>() / count;
        let deviation = (weights
            .iter()
            .map(|weight| (weight - mean).powi(2))
            .sum::<f64>()
            / count)
            .sqrt();
        assert!(
            mean.abs() < 1e-3 && (0.017..0.023).contains(&deviation),
            "{spec}: mean {mean}, deviation {deviation}"
        );
    }
}

/// Checks that several concurrent threads get the same bits from a layer whose columns are split
/// over many blocks.
fn threads(device: &Device, seed: u64) {
    let dtype = if device.supports_dtype(FloatDType::F16) {
        ActivationDtype::F16
    } else {
        ActivationDtype::F32
    };
    let case = Case {
        m: 2,
        k: 2048,
        n: 72,
        spec: QuantSpec::int4(GroupSize::G128),
        activations: dtype,
        permuted: false,
        sparsity: Sparsity::Dense,
    };
    let operands = Operands::random(&case, seed);
    let layer = layer(&case, &operands, device);
    let run = |layer: &QuantLinear| {
        values(layer.forward(tensor(&operands.x, [case.m, case.k], dtype, device)))
    };
    let first = run(&layer);
    check(&case, seed, &first, &operands);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (layer, run, first) = (layer.clone(), &run, &first);
            scope.spawn(move || {
                for _ in 0..20 {
                    assert!(
                        run(&layer) == *first,
                        "{case}, seed {seed}: bits differ between threads"
                    );
                }
            });
        }
    });
}

/// Checks the plan of each case and the layout of its weight.
fn plans(device: &Device, seed: u64) {
    // Every card from Ampere on has tensor cores; tests run only on such cards.
    let has_tensor_cores = *device == Device::cuda(0);
    for case in cases()
        .iter()
        .filter(|case| computes(device, case.activations))
    {
        let weight = QuantizedWeight::from_plain_for(
            &Operands::random(&Case { m: 1, ..*case }, seed).weight,
            case.activations,
            device,
        );
        let on_tensor_cores = has_tensor_cores && case.activations != ActivationDtype::F32;
        let plan = weight.plan(case.m, case.activations, Prologue::None);
        assert_eq!(
            runs_on_tensor_cores(&plan),
            on_tensor_cores,
            "{case}: {}, because {}",
            plan.kernel,
            plan.reason
        );
        assert_eq!(
            weight.layout() == WeightLayout::Tile,
            on_tensor_cores,
            "{case}: laid out {}",
            weight.layout()
        );
    }
}

fn from_linear(device: &Device) {
    let linear = LinearConfig::new(96, 33).init(device);
    let x = Tensor::<2>::random([5, 96], Distribution::Normal(0.0, 1.0), device);
    let float = values(linear.forward(x.clone()));
    // 8 bits have 16 times as many levels as 4 bits, so the error is a sixteenth.
    for (spec, rounding) in [
        (QuantSpec::int4(GroupSize::G32), 1e-3..0.15),
        (QuantSpec::int8(GroupSize::G32), 1e-4..0.01),
    ] {
        let layer =
            QuantLinear::from_linear(&linear, &spec).unwrap_or_else(|error| panic!("{error}"));
        let dense = Linear {
            weight: Param::from_tensor(layer.weight().dequantize(FloatDType::F32)),
            bias: linear.bias.clone(),
        };
        // The reference runs on Flex, because Burn's own f32 matmul may run in TF32 on CUDA.
        let flex = Device::flex();
        let expected = values(
            dense
                .to_device(&flex)
                .forward(Tensor::<2>::from_data(x.to_data(), &flex)),
        );
        let error = relative_error(&values(layer.forward(x.clone())), &expected);
        assert!(
            error < 1e-5,
            "{spec}: against the dequantised layer: {error:e}"
        );
        let error = relative_error(&values(layer.forward(x.clone())), &float);
        assert!(
            rounding.contains(&error),
            "{spec}: against the float layer: {error:e}, which is no error of its bits"
        );
    }
}

fn gradient(device: &Device, seed: u64) {
    for (k, spec) in [
        (64, QuantSpec::int4(GroupSize::G32)),
        (72, QuantSpec::int8(GroupSize::G32)),
        (72, QuantSpec::int4(GroupSize::G64)),
    ] {
        gradient_of(k, spec.with_zero_points(), device, seed);
    }
}

fn gradient_of(k: usize, spec: QuantSpec, device: &Device, seed: u64) {
    let case = Case {
        m: 6,
        k,
        n: 24,
        spec,
        activations: ActivationDtype::F32,
        permuted: true,
        sparsity: Sparsity::Dense,
    };
    let operands = Operands::random(&case, seed);
    let device = device.clone().autodiff();
    let layer = layer(&case, &operands, &device);
    let x = tensor(&operands.x, [2, 3, k], case.activations, &device).require_grad();
    let y = layer.forward(x.clone());
    check(&case, seed, &values(y.clone()), &operands);
    // d sum(y^2) / dx = 2 y W^T
    let gradients = y.powi_scalar(2).sum().backward();
    let found = values(
        x.grad(&gradients)
            .unwrap_or_else(|| panic!("no gradient reached the activations")),
    );
    let weight = operands.weight.dequantize();
    let mut expected = vec![0.0f64; 6 * k];
    for (i, expected) in expected.iter_mut().enumerate() {
        let (row, feature) = (i / k, i % k);
        *expected = (0..24)
            .map(|n| 2.0 * operands.expected[row * 24 + n] * f64::from(weight[feature * 24 + n]))
            .sum();
    }
    let error = relative_error(&found, &expected);
    // Burn's f32 matmul in the backward pass may run in TF32 on CUDA: 10 bits of mantissa.
    assert!(
        error < 1e-3,
        "K = {k}, {spec}, seed {seed}: relative error {error:e}"
    );
}

fn display(device: &Device) {
    let linear = LinearConfig::new(64, 33).init(device);
    for (spec, format) in [
        (QuantSpec::int4(GroupSize::G64), "int4 g64 f16"),
        (QuantSpec::int8(GroupSize::G64), "int8 g64 f16"),
    ] {
        let layer =
            QuantLinear::from_linear(&linear, &spec).unwrap_or_else(|error| panic!("{error}"));
        let shown = format!("{layer}");
        assert!(
            shown.contains("k: 64") && shown.contains("n: 33") && shown.contains(format),
            "{shown}"
        );
    }
}

fn held_bytes(device: &Device) {
    let linear = LinearConfig::new(1024, 1024).with_bias(false).init(device);
    let scale_bytes = if device.supports_dtype(FloatDType::F16) {
        2
    } else {
        4
    };
    for (spec, words) in [
        (QuantSpec::int4(GroupSize::G128), 1024 * 1024 / 2),
        (QuantSpec::int8(GroupSize::G128), 1024 * 1024),
    ] {
        let weight = QuantizedWeight::quantize(linear.weight.val(), &spec)
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(weight.size_bytes(), words + 8 * 1024 * scale_bytes);
    }
}
