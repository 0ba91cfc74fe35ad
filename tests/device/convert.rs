//! Conversion of ordinary Burn models with one call.

mod outputs;
mod pruned;

use crate::convert_loading::{batch, fresh};
use crate::layer::values;
use crate::models::Mlp;
use crate::setup::{Named, trial};
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout};
use burn::store::ModuleRecord;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_marlin::convert::{Outcome, SkipReason, reset_placeholders};
use burn_marlin::{Error, GroupSize, QuantSpec, ScaleDtype, WeightQuantizer};
use libtest_mimic::Trial;
use marlin_testing::relative_error;

/// The largest relative error against a float model with the same weights. It comes from the
/// rounding of f32 sums, and of the activations computed from the sums.
pub const SAME_WEIGHTS: f64 = 2e-4;

/// The largest relative error against a float model with the same weights if Burn's own matmul runs
/// on the device. On CUDA, that matmul may compute f32 in TF32, with 10 bits of mantissa.
pub const SAME_WEIGHTS_IN_BURN: f64 = 2e-3;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(
        device,
        "convert::mlp_equals_w4a16_linear",
        outputs::mlp_equals_layers,
    ));
    tests.push(trial(
        device,
        "convert::mlp_in_column_layout",
        outputs::mlp_in_column_layout,
    ));
    tests.push(trial(
        device,
        "convert::mlp_of_odd_sizes",
        outputs::mlp_of_odd_sizes,
    ));
    tests.push(trial(
        device,
        "convert::transformer_encoder",
        outputs::transformer,
    ));
    tests.push(trial(
        device,
        "convert::half_precision",
        outputs::half_precision,
    ));
    tests.push(trial(device, "convert::patterns_and_report", patterns));
    tests.push(trial(device, "convert::record_and_device", record));
    tests.push(trial(
        device,
        "convert::pruned_to_two_of_four",
        pruned::pruned,
    ));
    tests.push(trial(device, "convert::gradient_passes_through", gradient));
    tests.push(trial(device, "convert::small_weights_are_counted", small));
    tests.push(trial(device, "convert::nan_weights_are_refused", nan));
    tests.push(trial(
        device,
        "convert::a_second_conversion_leaves_the_first",
        twice,
    ));
}

pub fn convert<M: Module>(model: M, group: GroupSize) -> (M, burn_marlin::Report) {
    convert_to(QuantSpec::int4(group), model)
}

pub fn convert_to<M: Module>(spec: QuantSpec, model: M) -> (M, burn_marlin::Report) {
    WeightQuantizer::new(spec)
        .quantize(model)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Returns a format of each bit width, with the range of the error that its rounding causes in a
/// small model.
fn widths(group: GroupSize) -> [(QuantSpec, std::ops::Range<f64>); 2] {
    [
        (QuantSpec::int4(group), 1e-3..0.25),
        (QuantSpec::int8(group), 1e-4..0.02),
    ]
}

/// Returns the formats of floats, with the range of the error that their rounding causes in a small
/// model.
fn floats() -> [(QuantSpec, std::ops::Range<f64>); 3] {
    [
        (QuantSpec::fp8(), 1e-3..0.06),
        (QuantSpec::mxfp4(), 1e-2..0.3),
        (QuantSpec::nvfp4(), 1e-2..0.25),
    ]
}

/// Resets the placeholders of a model whose converted layers all hold a weight.
pub fn reset<M: Module>(model: M) -> M {
    reset_placeholders(model).unwrap_or_else(|error| panic!("{error}"))
}

pub fn close(found: &[f64], expected: &[f64], limit: f64, what: &str) {
    let error = relative_error(found, expected);
    assert!(
        error <= limit,
        "{what}: relative error {error:e}, limit {limit:e}"
    );
}

/// Returns the float model with the same dequantised weights, on Flex, whose matmuls compute in
/// f32.
pub fn dense<M: Module>(quantized: &M) -> M {
    quantized.clone().materialize().to_device(&Device::flex())
}

/// Casts a model to another dtype.
pub fn cast<M: Module>(model: M, dtype: FloatDType) -> M {
    struct Cast(FloatDType);
    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let dtype = self.0;
            param.map(|tensor| tensor.cast(dtype))
        }
    }
    model.map(&mut Cast(dtype))
}

pub fn on_flex<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    Tensor::from_data(x.to_data(), &Device::flex())
}

/// Checks that the report counts groups whose scales are zero in f16: weights scaled by 1e-8. In
/// bf16 no scale is zero.
fn small(device: &Device) {
    let mut float = Mlp::new([64, 96, 32], LinearLayout::Row, true, device);
    float.down.weight = float.down.weight.map(|weight| weight.mul_scalar(1e-8));
    for (scales, underflows) in [
        (ScaleDtype::F16, [0, 2 * 32 + 32]),
        (ScaleDtype::BF16, [0, 0]),
    ] {
        let spec = QuantSpec::int4(GroupSize::G32).with_scale_dtype(scales);
        let (_, report) = WeightQuantizer::new(spec)
            .quantize(float.clone())
            .unwrap_or_else(|error| panic!("{error}"));
        let found: Vec<usize> = report
            .layers
            .iter()
            .filter_map(|layer| match layer.outcome {
                Outcome::Quantized { underflows, .. } => Some(underflows),
                Outcome::Skipped(_) => None,
            })
            .collect();
        assert_eq!(found, underflows, "{report}");
        assert_eq!(
            format!("{report}").contains("1 layers have weights too small"),
            scales == ScaleDtype::F16,
            "{report}"
        );
        assert!(
            report.to_json().contains(&format!(
                "\"underflowing\":{}",
                u8::from(scales == ScaleDtype::F16)
            )),
            "{}",
            report.to_json()
        );
    }
}

#[derive(Module, Debug)]
struct Tagger {
    embedding: Embedding,
    body: Mlp,
    lm_head: Linear,
}

fn patterns(device: &Device) {
    let tagger = Tagger {
        embedding: EmbeddingConfig::new(10, 64).init(device),
        body: Mlp::new([64, 64, 64], LinearLayout::Row, true, device),
        lm_head: LinearConfig::new(64, 10).init(device),
    };
    let quantizer = WeightQuantizer::new(QuantSpec::int4(GroupSize::G64));
    let outcome = |report: &burn_marlin::Report, path: &str| {
        report
            .layers
            .iter()
            .find(|layer| layer.path == path)
            .map(|layer| layer.outcome.clone())
            .unwrap_or_else(|| panic!("{path} is not in:\n{report}"))
    };
    let (_, report) = quantizer
        .clone()
        .exclude("lm_head")
        .quantize(tagger.clone())
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(
        outcome(&report, "embedding.weight"),
        Outcome::Skipped(SkipReason::NotLinear)
    ));
    assert!(matches!(
        outcome(&report, "lm_head.weight"),
        Outcome::Skipped(SkipReason::Excluded { .. })
    ));
    assert!(matches!(
        outcome(&report, "body.up.weight"),
        Outcome::Quantized { .. }
    ));
    // The embedding is not a linear layer, and not counted.
    assert_eq!((report.quantized(), report.skipped()), (2, 1));

    let (_, report) = quantizer
        .clone()
        .include(r"^body\.")
        .exclude("down")
        .quantize(tagger.clone())
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(
        outcome(&report, "lm_head.weight"),
        Outcome::Skipped(SkipReason::NotIncluded)
    ));
    assert!(matches!(
        outcome(&report, "body.down.weight"),
        Outcome::Skipped(SkipReason::Excluded { .. })
    ));
    assert_eq!(report.quantized(), 1);

    let parameters = tagger.num_params();
    let broken = quantizer.include("(").quantize(tagger);
    let broken = broken
        .err()
        .unwrap_or_else(|| panic!("a pattern that is none was taken"));
    assert!(matches!(broken.error, Error::Pattern { .. }));
    assert_eq!(
        broken.model.num_params(),
        parameters,
        "the error gives the model back"
    );
}

fn record(device: &Device) {
    for (spec, _) in widths(GroupSize::G32) {
        let (model, _) = convert_to(spec, fresh(device));
        let x = batch(device);
        let expected = values(model.forward(x.clone()));
        let bytes = model
            .clone()
            .into_record()
            .into_bytes()
            .unwrap_or_else(|error| panic!("{error}"));
        // A float copy takes 32 bits a weight.
        assert!(
            bytes.len() < (128 * 96 + 96 * 64) * 2 * spec.value.bits() / 8,
            "{} bytes hold a float copy",
            bytes.len()
        );
        let record = ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{error}"));
        let loaded = convert_to(spec, fresh(device))
            .0
            .try_load_record(record)
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(
            values(loaded.forward(x.clone())),
            expected,
            "a reloaded model gives the same bits"
        );
        assert_eq!(loaded.up.weight.shape().dims(), [128, 96]);
        let moved = model.to_device(&Device::flex());
        close(
            &values(moved.forward(on_flex(&x))),
            &expected,
            SAME_WEIGHTS,
            "moved to another backend",
        );
    }
}

fn gradient(device: &Device) {
    for (spec, _) in widths(GroupSize::G32) {
        gradient_of(spec, device);
    }
}

fn gradient_of(spec: QuantSpec, device: &Device) {
    let (model, _) = convert_to(
        spec,
        Mlp::new([64, 96, 32], LinearLayout::Row, true, device),
    );
    let tracked = device.clone().autodiff();
    let x = Tensor::<2>::random([4, 64], Distribution::Normal(0.0, 1.0), device);
    let gradient_of = |model: &Mlp, x: Tensor<2>| {
        let x = x.require_grad();
        let gradients = model.forward(x.clone()).sum().backward();
        values(
            x.grad(&gradients)
                .unwrap_or_else(|| panic!("no gradient reached the activations")),
        )
    };
    let found = gradient_of(
        &Module::train(model.clone()),
        Tensor::from_data(x.to_data(), &tracked),
    );
    let expected = gradient_of(
        &Module::train(dense(&model)),
        Tensor::from_data(x.to_data(), &Device::flex().autodiff()),
    );
    close(&found, &expected, 2e-3, "gradient");
}

fn nan(device: &Device) {
    let mut model = Mlp::new([64, 64, 64], LinearLayout::Row, true, device);
    model.down.weight = model.down.weight.map(|weight| weight.mul_scalar(f32::NAN));
    let error = WeightQuantizer::new(QuantSpec::int4(GroupSize::G64))
        .quantize(model)
        .err()
        .unwrap_or_else(|| panic!("NaN weights were accepted"));
    assert!(error.to_string().starts_with("down.weight: "), "{error}");
}

fn twice(device: &Device) {
    let (model, _) = convert(
        Mlp::new([64, 96, 32], LinearLayout::Row, true, device),
        GroupSize::G32,
    );
    let x = Tensor::<2>::random([3, 64], Distribution::Normal(0.0, 1.0), device);
    let expected = values(model.forward(x.clone()));
    let (again, report) = convert(model, GroupSize::G32);
    assert_eq!(report.quantized(), 0, "{report}");
    assert!(
        report
            .layers
            .iter()
            .all(|layer| matches!(layer.outcome, Outcome::Skipped(SkipReason::Reparameterized))),
        "{report}"
    );
    assert_eq!(values(again.forward(x)), expected);
}
