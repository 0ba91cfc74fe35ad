//! GPTQ on the device, compared with GPTQ on the host.

use crate::setup::{Named, slow_on_cpu_runtime, trial};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::tensor::{Device, Tensor, TensorData};
use burn_marlin::WeightQuantizer;
use libtest_mimic::Trial;
use marlin_format::{FormatError, GroupSize, QuantSpec, ScaleDtype, Sparsity};
use marlin_quant::{
    Gptq, GptqCalibrator, GptqOptions, HessianSums, QuantError, Quantizer, RowOrder, gptq_beside,
};
use marlin_testing::{layer_inputs, random_values, relative_error};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The largest relative difference of the loss from the host's. The device sums f32 in another
/// order, which changes the chosen level or range of a few weights.
const LOSS_TOLERANCE: f64 = 0.02;

pub fn add(tests: &mut Vec<Trial>, device: &Named, seed: u64) {
    // CubeCL's CPU runtime compiles Burn's attention for half a minute.
    tests.push(slow_on_cpu_runtime(
        device,
        "gptq::a_transformer_is_calibrated",
        move |device| transformer(device, seed),
    ));
    // Flex and CubeCL's CPU runtime round weights on the host.
    if ["flex", "cpu"].contains(&device.name) {
        return;
    }
    tests.push(trial(
        device,
        "gptq::losses_are_those_of_the_host",
        move |device| losses(device, seed),
    ));
    tests.push(trial(
        device,
        "gptq::dead_and_dependent_features",
        move |device| degenerate(device, seed),
    ));
    tests.push(trial(
        device,
        "gptq::wrong_weights_are_refused",
        move |device| refusals(device, seed),
    ));
}

/// Checks that GPTQ calibrates an unmodified module of Burn on the device.
fn transformer(device: &Device, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let model: TransformerEncoder = TransformerEncoderConfig::new(64, 128, 4, 1)
        .with_norm_first(true)
        .init(device);
    let batches: Vec<Tensor<3>> = (0..3)
        .map(|_| {
            Tensor::from_data(
                TensorData::new(activations(100, 64, &mut rng)[0].clone(), [2, 50, 64]),
                device,
            )
        })
        .collect();
    let forward = |model: &TransformerEncoder, batch: Tensor<3>| {
        model.forward(TransformerEncoderInput::new(batch))
    };
    let conversion = WeightQuantizer::new(QuantSpec::int4(GroupSize::G32));
    let (rounded, _) = conversion
        .quantize(model.clone())
        .unwrap_or_else(|error| panic!("{error}"));
    let (found, report) = GptqCalibrator::new(conversion)
        .quantize(model.clone(), batches.clone(), |model, batch, device| {
            drop(forward(model, batch.to_device(device)))
        })
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.layers.len(), 6);
    assert!(
        report
            .layers
            .iter()
            .all(|loss| loss.tokens == 300 && !loss.fell_back),
        "{:?}",
        report.layers
    );
    let output = |model: &TransformerEncoder| -> Vec<f64> {
        let values = forward(model, batches[0].clone())
            .try_into_vec_as::<f32>()
            .unwrap_or_else(|error| panic!("{error}"));
        values.into_iter().map(f64::from).collect()
    };
    let expected = output(&model);
    let [before, after] = [&rounded, &found].map(|other| relative_error(&output(other), &expected));
    println!("{before:.4} rounded, {after:.4} by GPTQ");
    assert!(after < 0.8 * before, "{after} of {before}");
}

/// Draws a layer's inputs [tokens, K], and similar inputs of a float model.
fn activations(tokens: usize, k: usize, rng: &mut StdRng) -> [Vec<f32>; 2] {
    let rows = layer_inputs(tokens, k, 2.0, rng);
    let near = rows
        .iter()
        .map(|value| value * rng.random_range(0.95..1.05))
        .collect();
    [rows, near]
}

fn tensor(values: &[f32], columns: usize, device: &Device) -> Tensor<2> {
    Tensor::from_data(
        TensorData::new(values.to_vec(), [values.len() / columns, columns]),
        device,
    )
}

/// Returns the Hessian sums of a layer's inputs, added on a device in three batches. The inputs are
/// added with `residual` [tokens, N], the error for which the layer's outputs compensate, or beside
/// the activations of a float model.
fn sums(
    activations: &[Vec<f32>; 2],
    residual: Option<&[f32]>,
    k: usize,
    device: &Device,
) -> HessianSums {
    let mut sums = HessianSums::new(k, device);
    let tokens = activations[0].len() / k;
    for part in [
        0..tokens / 2,
        tokens / 2..tokens / 2 + 1,
        tokens / 2 + 1..tokens,
    ] {
        let [x, float] = activations
            .each_ref()
            .map(|rows| tensor(&rows[part.start * k..part.end * k], k, device));
        let added = match residual {
            Some(residual) => {
                let n = residual.len() / tokens;
                sums.add_with_residual(
                    x,
                    tensor(&residual[part.start * n..part.end * n], n, device),
                )
            }
            None => sums.add_beside(x, float),
        };
        added.unwrap_or_else(|error| panic!("{error}"));
    }
    sums
}

fn quantized(
    weight: &[f32],
    n: usize,
    sums: &HessianSums,
    spec: &QuantSpec,
    options: &GptqOptions,
) -> Gptq {
    gptq_beside(weight, n, sums, spec, options).unwrap_or_else(|error| panic!("{error}"))
}

fn losses(device: &Device, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let sparse = GptqOptions {
        sparsity: Sparsity::TwoFour,
        ..GptqOptions::default()
    };
    let of = |order| GptqOptions {
        order,
        ..GptqOptions::default()
    };
    let bf16 = |group| QuantSpec::int4(group).with_scale_dtype(ScaleDtype::BF16);
    // The last number of a case is the size of its weights: 1, or so small that scales are
    // subnormal in f16.
    let cases = [
        (
            QuantSpec::int4(GroupSize::G128),
            GptqOptions::default(),
            300,
            70,
            1.0,
        ),
        (
            QuantSpec::int4(GroupSize::G32),
            of(RowOrder::ActOrder),
            128,
            64,
            1.0,
        ),
        (
            QuantSpec::int4(GroupSize::G64).with_zero_points(),
            of(RowOrder::Natural),
            200,
            65,
            1.0,
        ),
        (
            QuantSpec::int4(GroupSize::Channel),
            GptqOptions::default(),
            300,
            70,
            1.0,
        ),
        (
            QuantSpec::int8(GroupSize::G128),
            GptqOptions {
                correction: 0.0,
                ..GptqOptions::default()
            },
            129,
            3,
            1.0,
        ),
        (QuantSpec::int4(GroupSize::G128), sparse, 256, 70, 1.0),
        (QuantSpec::int4(GroupSize::Channel), sparse, 132, 64, 1.0),
        (bf16(GroupSize::G64), GptqOptions::default(), 128, 66, 1.0),
        (
            QuantSpec::int4(GroupSize::G64),
            GptqOptions {
                correction: 0.0,
                ..GptqOptions::default()
            },
            128,
            66,
            1e-4,
        ),
    ];
    for (case, (spec, options, k, n, size)) in cases.into_iter().enumerate() {
        let (mut weight, tokens) = (random_values(k * n, 1.0, &mut rng), 2 * k);
        weight.iter_mut().for_each(|value| *value *= size);
        let (activations, residual) = (
            activations(tokens, k, &mut rng),
            random_values(tokens * n, 1.0, &mut rng),
        );
        let residual = case.is_multiple_of(2).then_some(&residual[..]);
        let [expected, found] = [&Device::flex(), device].map(|device| {
            quantized(
                &weight,
                n,
                &sums(&activations, residual, k, device),
                &spec,
                &options,
            )
        });
        assert_eq!(
            (found.weight.k(), found.weight.n(), found.weight.sparsity()),
            (k, n, options.sparsity)
        );
        let (expected_values, values) = (expected.weight.dequantize(), found.weight.dequantize());
        let same = expected_values
            .iter()
            .zip(&values)
            .filter(|(a, b)| a == b)
            .count();
        let change = found.loss() / expected.loss() - 1.0;
        println!(
            "{spec}, {options:?}, {k} x {n}: loss {:.4e}, {:+.3} %; {same} of {} equal",
            found.loss(),
            100.0 * change,
            k * n
        );
        assert!(
            change.abs() < LOSS_TOLERANCE,
            "{spec} {options:?} {k} x {n}: loss {} for {}",
            found.loss(),
            expected.loss()
        );
        assert!(
            same * 10 > k * n * 6,
            "{spec} {options:?}: {same} of {} values are the host's",
            k * n
        );
        assert_eq!(
            (found.damping, found.dead),
            (expected.damping, expected.dead)
        );

        let sums = sums(&activations, residual, k, device);
        let (again, values) = options
            .quantize_on_device(tensor(&weight, n, device), Some(&sums), &spec)
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(
            again.weight, found.weight,
            "{spec} {options:?}: of a weight on the device"
        );
        let on_device = values
            .try_into_vec_as::<f32>()
            .unwrap_or_else(|error| panic!("{error}"));
        assert!(
            on_device == found.weight.dequantize(),
            "{spec} {options:?}: values on the device"
        );
    }
}

/// Checks features that are always zero, and features that equal their neighbours. Without damping,
/// such a Hessian has no Cholesky factor.
fn degenerate(device: &Device, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let (k, n, tokens) = (160, 8, 200);
    let (weight, [mut x, _]) = (
        random_values(k * n, 1.0, &mut rng),
        activations(tokens, k, &mut rng),
    );
    for row in x.chunks_exact_mut(k) {
        (row[7], row[130]) = (0.0, 0.0);
        (row[41], row[42]) = (row[40], row[40]);
    }
    let spec = QuantSpec::int4(GroupSize::G32);
    let [expected, found] = [&Device::flex(), device].map(|device| {
        quantized(
            &weight,
            n,
            &sums(&[x.clone(), x.clone()], None, k, device),
            &spec,
            &GptqOptions::default(),
        )
    });
    assert_eq!((found.dead, expected.dead), (2, 2));
    let change = found.loss() / expected.loss() - 1.0;
    assert!(
        change.abs() < LOSS_TOLERANCE,
        "loss {} for {}",
        found.loss(),
        expected.loss()
    );
}

fn refusals(device: &Device, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let (k, n) = (64, 4);
    let mut weight = random_values(k * n, 1.0, &mut rng);
    let activations = activations(100, k, &mut rng);
    let sums = sums(&activations, None, k, device);
    let refused = |weight: &[f32]| {
        gptq_beside(
            weight,
            n,
            &sums,
            &QuantSpec::int4(GroupSize::G32),
            &GptqOptions::default(),
        )
        .expect_err("a wrong weight")
    };
    assert!(matches!(refused(&weight[1..]), QuantError::Shape { .. }));
    weight[9] = 1e30;
    assert!(matches!(
        refused(&weight),
        QuantError::Format(FormatError::ScaleOverflow { .. })
    ));
    weight[9] = f32::NAN;
    assert!(matches!(
        refused(&weight),
        QuantError::Format(FormatError::NonFiniteWeight { .. })
    ));
}
