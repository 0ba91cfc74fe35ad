//! `QuantizedWeight` and `QuantLinear` on Burn's tensors.

use crate::setup::{Named, computes, float_dtype, trial};
use burn::backend::Dispatch;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};
use burn_marlin::backend::{OptionalFloat, QuantBackend, QuantTensors};
use burn_marlin::{GroupSize, QuantLinear, QuantSpec, QuantizedWeight};
use libtest_mimic::Trial;
use marlin_format::{PlainWeight, ScaleDtype, Scales, Sparsity, WeightLayout};
use marlin_kernels::{ActivationDtype, Epilogue, Prologue};
use marlin_tests::{Case, Operands, cases, relative_error, runs_on_tensor_cores, tolerance};

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    tests.push(trial(device, "layer::forward_agrees_with_f64", move |device| forward_agrees(device, seed)));
    tests.push(trial(device, "layer::a_norm_in_front_agrees_with_f64", move |device| norm_in_front(device, seed)));
    tests.push(trial(device, "layer::forward_takes_any_rank", move |device| any_rank(device, seed)));
    tests.push(trial(device, "layer::activations_may_start_anywhere", move |device| unaligned(device, seed)));
    tests.push(trial(device, "layer::threads_do_not_disturb_each_other", move |device| threads(device, seed)));
    tests.push(trial(device, "layer::half_precision_runs_on_tensor_cores_where_there_are", move |device| plans(device, seed)));
    if device.name != "flex" {
        tests.push(trial(device, "layer::the_tile_layout_serves_every_dtype", move |device| tile_layout(device, seed)));
    }
    tests.push(trial(device, "layer::from_linear_keeps_the_bias", from_linear));
    tests.push(trial(device, "layer::weight_survives_device_and_record", move |device| round_trips(device, seed)));
    tests.push(trial(device, "layer::a_record_is_taken_in_its_own_format", move |device| other_format(device, seed)));
    tests.push(trial(device, "layer::gradient_reaches_the_activations_alone", move |device| gradient(device, seed)));
    tests.push(trial(device, "layer::display_shows_true_sizes", display));
    tests.push(trial(device, "layer::no_float_copy_is_held", held_bytes));
    tests.push(trial(device, "layer::random_weights_lie_around_zero", random_weights));
}

pub fn tensor<const D: usize>(values: &[f32], shape: [usize; D], dtype: ActivationDtype, device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, DType::from(float_dtype(dtype))))
}

pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().convert::<f64>().try_into_vec::<f64>().unwrap_or_else(|error| panic!("{error:?}"))
}

fn layer(case: &Case, operands: &Operands, device: &Device) -> QuantLinear {
    let bias = tensor(&operands.bias, [case.n], case.activations, device);
    QuantLinear::new(QuantizedWeight::from_plain(&operands.weight, device), Some(bias)).unwrap_or_else(|error| panic!("{case}: {error}"))
}

fn check(case: &Case, seed: u64, found: &[f64], operands: &Operands) {
    let error = relative_error(found, &operands.expected, &operands.magnitude);
    assert!(error <= tolerance(case.activations), "{case}, seed {seed}: relative error {error:e}");
}

fn forward_agrees(device: &Device, seed: u64) {
    let mut ran = 0;
    for case in cases().iter().filter(|case| computes(device, case.activations)) {
        let operands = Operands::random(case, seed);
        let x = tensor(&operands.x, [case.m, case.k], case.activations, device);
        let y = layer(case, &operands, device).forward(x);
        assert_eq!(y.dtype(), DType::from(float_dtype(case.activations)), "{case}");
        check(case, seed, &values(y), &operands);
        ran += 1;
    }
    assert!(ran > 0, "no case has a dtype that this device supports");
}

/// Checks the mean and deviation of random weights: with others, a model of many layers would leave the range of f16.
fn random_weights(device: &Device) {
    for spec in [QuantSpec::int4(GroupSize::G128), QuantSpec::int4(GroupSize::G32).with_zero_points(), QuantSpec::int8(GroupSize::Channel)]
    {
        let weight =
            QuantizedWeight::random(512, 1024, spec, ActivationDtype::F32, device).unwrap_or_else(|error| panic!("{spec}: {error}"));
        let weights = values(weight.dequantize(FloatDType::F32));
        let count = weights.len() as f64;
        let mean = weights.iter().sum::<f64>() / count;
        let deviation = (weights.iter().map(|weight| (weight - mean).powi(2)).sum::<f64>() / count).sqrt();
        assert!(mean.abs() < 1e-3 && (0.017..0.023).contains(&deviation), "{spec}: mean {mean}, deviation {deviation}");
    }
}

/// Checks one row, for which some cards have a separate kernel, and three; with weights that this kernel supports, and others.
fn norm_in_front(device: &Device, seed: u64) {
    const EPSILON: f64 = 1e-5;
    for dtype in [ActivationDtype::F16, ActivationDtype::BF16, ActivationDtype::F32].into_iter().filter(|&dtype| computes(device, dtype)) {
        let scales = if dtype == ActivationDtype::BF16 { ScaleDtype::BF16 } else { ScaleDtype::F16 };
        let (none, swiglu) = (Epilogue::None, Epilogue::SwiGlu);
        for (m, k, n, group, permuted, epilogue) in [
            (1, 1024, 65, GroupSize::G128, false, none),
            (3, 1024, 65, GroupSize::G128, false, none),
            (1, 1024, 65, GroupSize::G128, true, none),
            (1, 1000, 65, GroupSize::Channel, false, none),
            (1, 96, 65, GroupSize::G32, false, none),
            (1, 344, 65, GroupSize::G32, false, none),
            (1, 1096, 65, GroupSize::G128, false, none),
            // Gates and ups that fill tiles, and others.
            (1, 1024, 256, GroupSize::G128, false, swiglu),
            (1, 1024, 66, GroupSize::G128, false, swiglu),
            (3, 1024, 256, GroupSize::G128, true, swiglu),
            (3, 1000, 256, GroupSize::Channel, false, swiglu),
            (20, 1024, 512, GroupSize::G64, false, swiglu),
            (3, 344, 66, GroupSize::G32, false, swiglu),
        ] {
            let spec = QuantSpec::int4(group).with_zero_points().with_scale_dtype(scales);
            let case = Case { m, k, n, spec, activations: dtype, permuted, sparsity: Sparsity::Dense };
            let mut operands = Operands::random(&case, seed);
            let random = |seed| tensor(&Operands::random(&case, seed).x, [m, k], dtype, device);
            let (x, residual, norm) = (random(seed), random(seed + 1), random(seed + 2).slice_dim(0, 0..1).reshape([k]));
            let sum = values(x.clone() + residual.clone());
            let weights = values(norm.clone());
            let normalised = |row: &[f64]| {
                let root = (row.iter().map(|value| value * value).sum::<f64>() / k as f64 + EPSILON).sqrt();
                row.iter().zip(&weights).map(|(value, weight)| (value / root * weight) as f32).collect::<Vec<_>>()
            };
            operands.x = sum.chunks(k).flat_map(normalised).collect();
            operands.recompute(&case);
            let (y, found) = marlin_decode::norm_linear(&layer(&case, &operands, device), x, residual, norm, EPSILON, epilogue);
            if epilogue == Epilogue::SwiGlu {
                (operands.expected, operands.magnitude) = operands.swiglu(&case);
            }
            check(&case, seed, &values(y), &operands);
            assert!(values(found) == sum, "{case}, seed {seed}: the sum differs");
        }
    }
}

fn any_rank(device: &Device, seed: u64) {
    let spec = QuantSpec::int4(GroupSize::G32);
    let case = Case { m: 12, k: 64, n: 40, spec, activations: ActivationDtype::F32, permuted: false, sparsity: Sparsity::Dense };
    let operands = Operands::random(&case, seed);
    let layer = layer(&case, &operands, device);
    let x = tensor(&operands.x, [12, 64], case.activations, device);
    let y3 = layer.forward(x.clone().reshape([3, 4, 64]));
    assert_eq!(y3.dims(), [3, 4, 40]);
    check(&case, seed, &values(y3), &operands);
    let y4 = layer.forward(x.clone().reshape([1, 2, 6, 64]));
    assert_eq!(y4.dims(), [1, 2, 6, 40]);
    check(&case, seed, &values(y4), &operands);
    let y1 = layer.forward(x.clone().slice([0..1, 0..64]).reshape([64]));
    assert_eq!(y1.dims(), [40]);
    let error = relative_error(&values(y1), &operands.expected[..40], &operands.magnitude[..40]);
    assert!(error <= tolerance(case.activations), "rank 1: relative error {error:e}");
    // Activations that are a view: the kernel must not assume contiguous rows.
    let view = layer.forward(x.reshape([3, 4, 64]).swap_dims(0, 1)).swap_dims(0, 1);
    check(&case, seed, &values(view), &operands);
}

/// Checks rows that are a view into a tensor, at an address that is not a multiple of 16.
fn unaligned(device: &Device, seed: u64) {
    for activations in [ActivationDtype::F32, ActivationDtype::F16].into_iter().filter(|&dtype| computes(device, dtype)) {
        let case =
            Case { m: 3, k: 64, n: 40, spec: QuantSpec::int4(GroupSize::G32), activations, permuted: false, sparsity: Sparsity::Dense };
        let operands = Operands::random(&case, seed);
        let layer = layer(&case, &operands, device);
        for start in [1, 3, 8] {
            let padded: Vec<f32> = vec![f32::NAN; start].into_iter().chain(operands.x.iter().copied()).collect();
            let length = padded.len();
            let x = tensor(&padded, [length], activations, device).slice(start..length).reshape([case.m, case.k]);
            check(&case, seed, &values(layer.forward(x)), &operands);
        }
    }
}

/// Checks that several threads at a time get the same bits, from a column that is split over many blocks.
fn threads(device: &Device, seed: u64) {
    let dtype = if device.supports_dtype(FloatDType::F16) { ActivationDtype::F16 } else { ActivationDtype::F32 };
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
    let run = |layer: &QuantLinear| values(layer.forward(tensor(&operands.x, [case.m, case.k], dtype, device)));
    let first = run(&layer);
    check(&case, seed, &first, &operands);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (layer, run, first) = (layer.clone(), &run, &first);
            scope.spawn(move || {
                for _ in 0..20 {
                    assert!(run(&layer) == *first, "{case}, seed {seed}: bits differ between threads");
                }
            });
        }
    });
}

/// Checks the plan of each case and the layout of its weight.
fn plans(device: &Device, seed: u64) {
    // Cards from Ampere on; tests run on no other.
    let has_tensor_cores = *device == Device::cuda(0);
    for case in cases().iter().filter(|case| computes(device, case.activations)) {
        let weight = QuantizedWeight::from_plain_for(&Operands::random(&Case { m: 1, ..*case }, seed).weight, case.activations, device);
        let on_tensor_cores = has_tensor_cores && case.activations != ActivationDtype::F32;
        let plan = weight.plan(case.m, case.activations, Prologue::None);
        assert_eq!(runs_on_tensor_cores(&plan), on_tensor_cores, "{case}: {}, because {}", plan.kernel, plan.reason);
        assert_eq!(weight.layout() == WeightLayout::Tile, on_tensor_cores, "{case}: laid out {}", weight.layout());
    }
}

/// Checks a weight in the tile layout when dequantised, and with activations in f32, which tensor cores do not support.
fn tile_layout(device: &Device, seed: u64) {
    let takes = |case: &&Case| case.activations == ActivationDtype::F32 && case.m <= 65;
    for case in cases().iter().filter(takes) {
        let operands = Operands::random(case, seed);
        let (plain, descriptor) = (plain_weight(&operands.weight, device), operands.weight.descriptor());
        let tile = Dispatch::quant_repack(plain.clone(), descriptor, descriptor.in_layout(WeightLayout::Tile));
        // Padding must be zeros, so that padded products are zero.
        let layout = descriptor.tile_scales();
        let scales = Scales::F32(operands.weight.scales().to_f32());
        let padded = layout.pack(&scales).unwrap_or_else(|error| panic!("{case}: {error}")).to_f32();
        let found = values(Tensor::<2>::from_dispatch(tile.scales.clone()));
        assert!(found == padded.into_iter().map(f64::from).collect::<Vec<_>>(), "{case}, seed {seed}: scales in tiles");
        let (tile, descriptor) =
            (QuantTensors { row_permutation: plain.row_permutation, ..tile }, descriptor.in_layout(WeightLayout::Tile));
        let dense = Tensor::<2>::from_dispatch(Dispatch::quant_dequantize(tile.clone(), descriptor, FloatDType::F32));
        assert_eq!(dense.dims(), [case.k, case.n], "{case}");
        let expected: Vec<f64> = operands.weight.dequantize().into_iter().map(f64::from).collect();
        assert!(values(dense) == expected, "{case}, seed {seed}: dequantised");
        let x = tensor(&operands.x, [case.m, case.k], case.activations, device).into_dispatch();
        let bias = tensor(&operands.bias, [case.n], case.activations, device).into_dispatch();
        let y = Tensor::<2>::from_dispatch(Dispatch::quant_linear(x, tile, descriptor, OptionalFloat::Present(bias)));
        check(case, seed, &values(y), &operands);
    }
}

/// Makes the tensors of a weight in the plain layout, with scales in f32.
fn plain_weight(weight: &PlainWeight, device: &Device) -> QuantTensors<Dispatch> {
    let shapes = weight.descriptor().tensors();
    let int = |words: &[u32], shape: [usize; 2]| {
        let words: Vec<i32> = words.iter().map(|&word| word as i32).collect();
        Tensor::<2, Int>::from_data(TensorData::new(words, shape), (device, DType::I32))
    };
    let zeros = weight.zero_point_words().zip(shapes.zero_points);
    let rows = weight.row_permutation().map(|rows| int(rows, [1, rows.len()]).reshape([rows.len()]));
    QuantTensors {
        words: int(weight.words(), shapes.words.matrix_shape()).into_dispatch(),
        metadata: weight.metadata().zip(shapes.metadata).map(|(words, shape)| int(words, shape.matrix_shape()).into_dispatch()).into(),
        scales: tensor(&weight.scales().to_f32(), shapes.scales.matrix_shape(), ActivationDtype::F32, device).into_dispatch(),
        zero_points: zeros.map(|(words, shape)| int(&words, shape.matrix_shape()).into_dispatch()).into(),
        row_permutation: rows.map(Tensor::<1, Int>::into_dispatch).into(),
    }
}

fn from_linear(device: &Device) {
    let linear = LinearConfig::new(96, 33).init(device);
    let x = Tensor::<2>::random([5, 96], Distribution::Normal(0.0, 1.0), device);
    let float = values(linear.forward(x.clone()));
    // With 16 times as many levels, the error is a sixteenth.
    for (spec, rounding) in [(QuantSpec::int4(GroupSize::G32), 1e-3..0.15), (QuantSpec::int8(GroupSize::G32), 1e-4..0.01)] {
        let layer = QuantLinear::from_linear(&linear, &spec).unwrap_or_else(|error| panic!("{error}"));
        let dense = Linear { weight: Param::from_tensor(layer.weight().dequantize(FloatDType::F32)), bias: linear.bias.clone() };
        // Burn's own f32 matmul may run in TF32 on CUDA, so both sides of the comparison are this project's and f64's.
        let flex = Device::flex();
        let expected = values(dense.to_device(&flex).forward(Tensor::<2>::from_data(x.to_data(), &flex)));
        let error = relative_error(&values(layer.forward(x.clone())), &expected, &expected);
        assert!(error < 1e-5, "{spec}: against the dequantised layer: {error:e}");
        let error = relative_error(&values(layer.forward(x.clone())), &float, &float);
        assert!(rounding.contains(&error), "{spec}: against the float layer: {error:e}, which is no error of its bits");
    }
}

fn round_trips(device: &Device, seed: u64) {
    let flex = Device::flex();
    for (i, case) in cases().iter().filter(|case| case.activations == ActivationDtype::F32).enumerate() {
        let operands = Operands::random(case, seed.wrapping_add(i as u64));
        let weight = QuantizedWeight::from_plain(&operands.weight, device);
        // Devices without sparse tensor cores hold a 2:4 weight dense.
        let back = |weight: &QuantizedWeight| weight.to_plain().unwrap_or_else(|error| panic!("{case}: {error}")).into_dense();
        assert_eq!(back(&weight), *operands.weight.to_dense(), "{case}");
        let moved = weight.clone().to_device(&flex).to_device(device);
        assert_eq!(back(&moved), *operands.weight.to_dense(), "{case} moved");

        let bytes = weight.into_record().into_bytes().unwrap_or_else(|error| panic!("{case}: {error}"));
        let other = Operands::random(case, seed.wrapping_add(1 + i as u64));
        let record = ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{case}: {error}"));
        let loaded =
            QuantizedWeight::from_plain(&other.weight, &flex).try_load_record(record).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(back(&loaded), *operands.weight.to_dense(), "{case} reloaded on another device");
    }
}

fn other_format(device: &Device, seed: u64) {
    let case = |spec, k, permuted| Case { m: 1, k, n: 24, spec, activations: ActivationDtype::F32, permuted, sparsity: Sparsity::Dense };
    let weight = |case: &Case| QuantizedWeight::from_plain(&Operands::random(case, seed).weight, device);
    let record = |weight: &QuantizedWeight| {
        let bytes = weight.clone().into_record().into_bytes().unwrap_or_else(|error| panic!("{error}"));
        ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{error}"))
    };
    let formats = [
        case(QuantSpec::int4(GroupSize::G32), 72, false),
        case(QuantSpec::int8(GroupSize::G64).with_zero_points(), 72, false),
        case(QuantSpec::int4(GroupSize::Channel).with_scale_dtype(ScaleDtype::BF16), 72, true),
    ];
    for (from, to) in formats.iter().flat_map(|from| formats.iter().map(move |to| (from, to))) {
        let (saved, target) = (weight(from), weight(to));
        let loaded = target.try_load_record(record(&saved)).unwrap_or_else(|error| panic!("{from} into {to}: {error}"));
        assert_eq!((loaded.spec(), loaded.is_permuted()), (from.spec, from.permuted), "the record's format is taken");
        assert_eq!(loaded.to_plain().ok(), saved.to_plain().ok(), "{from} into {to}");
        let unloaded =
            QuantizedWeight::unloaded(to.k, to.n, to.spec, ActivationDtype::F32, device).unwrap_or_else(|error| panic!("{error}"));
        assert!(values(unloaded.dequantize(FloatDType::F32)).iter().all(|value| value.is_nan()), "no values, none that look right");
        let loaded = unloaded.try_load_record(record(&saved)).unwrap_or_else(|error| panic!("{from} into {to}: {error}"));
        assert_eq!(loaded.to_plain().ok(), saved.to_plain().ok(), "{from} into an unloaded {to}");
    }
    // Another K: refused even where the tensors would fit.
    let channel = QuantSpec::int4(GroupSize::Channel);
    for (from, to) in [(7, 8), (8, 7), (64, 32)] {
        let loaded = weight(&case(channel, to, false)).try_load_record(record(&weight(&case(channel, from, false))));
        assert!(loaded.is_err(), "K = {from} was loaded as K = {to}");
    }
}

fn gradient(device: &Device, seed: u64) {
    for (k, spec) in [(64, QuantSpec::int4(GroupSize::G32)), (72, QuantSpec::int8(GroupSize::G32)), (72, QuantSpec::int4(GroupSize::G64))] {
        gradient_of(k, spec.with_zero_points(), device, seed);
    }
}

fn gradient_of(k: usize, spec: QuantSpec, device: &Device, seed: u64) {
    let case = Case { m: 6, k, n: 24, spec, activations: ActivationDtype::F32, permuted: true, sparsity: Sparsity::Dense };
    let operands = Operands::random(&case, seed);
    let device = device.clone().autodiff();
    let layer = layer(&case, &operands, &device);
    let x = tensor(&operands.x, [2, 3, k], case.activations, &device).require_grad();
    let y = layer.forward(x.clone());
    check(&case, seed, &values(y.clone()), &operands);
    // d sum(y^2) / dx = 2 y W^T
    let gradients = y.powi_scalar(2).sum().backward();
    let found = values(x.grad(&gradients).unwrap_or_else(|| panic!("no gradient reached the activations")));
    let weight = operands.weight.dequantize();
    let mut expected = vec![0.0f64; 6 * k];
    for (i, expected) in expected.iter_mut().enumerate() {
        let (row, feature) = (i / k, i % k);
        *expected = (0..24).map(|n| 2.0 * operands.expected[row * 24 + n] * f64::from(weight[feature * 24 + n])).sum();
    }
    let error = relative_error(&found, &expected, &expected);
    // Burn's f32 matmul in the backward pass may run in TF32 on CUDA: 10 bits of mantissa.
    assert!(error < 1e-3, "K = {k}, {spec}, seed {seed}: relative error {error:e}");
}

fn display(device: &Device) {
    let linear = LinearConfig::new(64, 33).init(device);
    for (spec, format) in [(QuantSpec::int4(GroupSize::G64), "int4 g64 f16"), (QuantSpec::int8(GroupSize::G64), "int8 g64 f16")] {
        let layer = QuantLinear::from_linear(&linear, &spec).unwrap_or_else(|error| panic!("{error}"));
        let shown = format!("{layer}");
        assert!(shown.contains("k: 64") && shown.contains("n: 33") && shown.contains(format), "{shown}");
    }
}

fn held_bytes(device: &Device) {
    let linear = LinearConfig::new(1024, 1024).with_bias(false).init(device);
    let scale_bytes = if device.supports_dtype(FloatDType::F16) { 2 } else { 4 };
    for (spec, words) in [(QuantSpec::int4(GroupSize::G128), 1024 * 1024 / 2), (QuantSpec::int8(GroupSize::G128), 1024 * 1024)] {
        let weight = QuantizedWeight::quantize(linear.weight.val(), &spec).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(weight.size_bytes(), words + 8 * 1024 * scale_bytes);
    }
}
