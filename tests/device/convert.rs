//! Conversion of ordinary Burn models with one call.

use crate::convert_models::outcome;
use crate::layer::values;
use crate::models::Mlp;
use crate::setup::{Named, computes, trial};
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use burn_marlin::convert::{LayerReport, LeftReason, Outcome, reset_placeholders};
use burn_marlin::fusion::fusion_count;
use burn_marlin::{Error, GroupSize, QuantLinear, QuantSpec, ScaleDtype, W4A16};
use libtest_mimic::Trial;
use marlin_format::{FormatError, Sparsity, check_two_four};
use marlin_tests::{relative_error, runs_on_tensor_cores};

/// The largest relative error to a model with the same weights in float: from the rounding of f32 sums, and of the activations computed from them.
pub const SAME_WEIGHTS: f64 = 2e-4;

/// The same if Burn's own matmul runs on the device: on CUDA it may compute f32 in TF32, with 10 bits of mantissa.
pub const SAME_WEIGHTS_IN_BURN: f64 = 2e-3;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(device, "convert::mlp_equals_w4a16_linear", mlp_equals_layers));
    tests.push(trial(device, "convert::mlp_in_column_layout", mlp_in_column_layout));
    tests.push(trial(device, "convert::mlp_of_odd_sizes", mlp_of_odd_sizes));
    tests.push(trial(device, "convert::transformer_encoder", transformer));
    tests.push(trial(device, "convert::half_precision", half_precision));
    tests.push(trial(device, "convert::patterns_and_report", patterns));
    tests.push(trial(device, "convert::record_and_device", record));
    tests.push(trial(device, "convert::pruned_to_two_of_four", pruned));
    tests.push(trial(device, "convert::gradient_passes_through", gradient));
    tests.push(trial(device, "convert::small_weights_are_counted", small));
    tests.push(trial(device, "convert::nan_weights_are_refused", nan));
    tests.push(trial(device, "convert::a_second_conversion_leaves_the_first", twice));
}

pub fn convert<M: Module>(model: M, group: GroupSize) -> (M, burn_marlin::Report) {
    convert_to(QuantSpec::int4(group), model)
}

pub fn convert_to<M: Module>(spec: QuantSpec, model: M) -> (M, burn_marlin::Report) {
    W4A16::new(spec).quantize(model).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the formats of both bit widths, each with the range of the error that its rounding causes in a small model.
fn widths(group: GroupSize) -> [(QuantSpec, std::ops::Range<f64>); 2] {
    [(QuantSpec::int4(group), 1e-3..0.25), (QuantSpec::int8(group), 1e-4..0.02)]
}

/// Resets the placeholders of a model whose converted layers all hold a weight.
pub fn reset<M: Module>(model: M) -> M {
    reset_placeholders(model).unwrap_or_else(|error| panic!("{error}"))
}

pub fn close(found: &[f64], expected: &[f64], limit: f64, what: &str) {
    let error = relative_error(found, expected, expected);
    assert!(error <= limit, "{what}: relative error {error:e}, limit {limit:e}");
}

/// Returns the float model with the same dequantised weights, on Flex, whose matmuls compute in f32.
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

/// Returns true if the device uses Burn's fusion.
fn fuses(device: &Device) -> bool {
    *device != Device::flex()
}

fn mlp_equals_layers(device: &Device) {
    for ((spec, rounding), bias) in widths(GroupSize::G32).into_iter().flat_map(|width| [true, false].map(|bias| (width.clone(), bias))) {
        let float = Mlp::new([128, 96, 64], LinearLayout::Row, bias, device);
        let layers =
            [&float.up, &float.down].map(|linear| QuantLinear::from_linear(linear, &spec).unwrap_or_else(|error| panic!("{error}")));
        let (model, report) = convert_to(spec, float.clone());
        assert_eq!((report.quantized(), report.left()), (2, 0), "{report}");
        assert_eq!(format!("{report:#}").matches(&spec.to_string()).count(), 2, "{report:#}");
        let reference = dense(&model);
        for shape in [[1, 1, 128], [1, 5, 128], [4, 1, 128], [3, 7, 128], [2, 33, 128]] {
            let x = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), device);
            device.sync().unwrap_or_else(|error| panic!("{error:?}"));
            let before = fusion_count();
            let y = values(model.forward(x.clone()));
            let after = fusion_count();
            if fuses(device) {
                assert_eq!(after.fused - before.fused, 2, "both matmuls of {shape:?} read the packed weight");
                assert_eq!(after.dequantized, before.dequantized, "no weight of {shape:?} was dequantised");
            }
            close(&y, &values(reference.forward(on_flex(&x))), SAME_WEIGHTS, "against the dequantised model");
            let by_layers = layers[1].forward(model.relu.forward(layers[0].forward(x.clone())));
            close(&y, &values(by_layers), 1e-5, "against QuantLinear");
            let float = values(float.forward(x));
            let error = relative_error(&y, &float, &float);
            assert!(rounding.contains(&error), "{spec}: against the float model: {error:e}, which is no error of its bits");
        }
    }
}

fn mlp_in_column_layout(device: &Device) {
    let float = Mlp::new([64, 96, 32], LinearLayout::Col, true, device);
    let (model, report) = convert(float, GroupSize::G32);
    assert_eq!(report.quantized(), 2, "{report}");
    assert_eq!(report.layers[0].shape, [64, 96]);
    let x = Tensor::<2>::random([5, 64], Distribution::Normal(0.0, 1.0), device);
    close(&values(model.forward(x.clone())), &values(dense(&model).forward(on_flex(&x))), SAME_WEIGHTS, "column layout");
}

fn mlp_of_odd_sizes(device: &Device) {
    // Up to K = 4, the words of both widths have the same shape, which fusion cannot distinguish.
    let sizes = [
        (GroupSize::Channel, [37, 51, 3]),
        (GroupSize::Channel, [3, 4, 5]),
        (GroupSize::G32, [37, 100, 3]),
        (GroupSize::G64, [37, 100, 3]),
    ];
    for (spec, sizes) in sizes.into_iter().flat_map(|(group, sizes)| widths(group).map(|(spec, _)| (spec, sizes))) {
        let (model, report) = convert_to(spec, Mlp::new(sizes, LinearLayout::Row, true, device));
        assert_eq!(report.quantized(), 2, "{report}");
        let x = Tensor::<2>::random([9, sizes[0]], Distribution::Normal(0.0, 1.0), device);
        close(&values(model.forward(x.clone())), &values(dense(&model).forward(on_flex(&x))), SAME_WEIGHTS, &format!("{spec}, {sizes:?}"));
        let shown = format!("{model}");
        let [input, output] = [format!("d_input: {}", sizes[0]), format!("d_output: {}", sizes[1])];
        assert!(shown.contains(&input) && shown.contains(&output), "Display shows the true sizes: {shown}");
    }
}

fn transformer(device: &Device) {
    let float: TransformerEncoder = TransformerEncoderConfig::new(64, 128, 4, 2).with_dropout(0.0).init(device);
    let (model, report) = convert(float.clone(), GroupSize::G32);
    assert_eq!(report.quantized(), 12, "{report}");
    let reference = dense(&model);
    for [batch, seq] in [[1, 1], [1, 7], [5, 1], [5, 3], [2, 32]] {
        let x = Tensor::<3>::random([batch, seq, 64], Distribution::Normal(0.0, 1.0), device);
        device.sync().unwrap_or_else(|error| panic!("{error:?}"));
        let before = fusion_count();
        let y = values(model.forward(TransformerEncoderInput::new(x.clone())));
        let after = fusion_count();
        if fuses(device) {
            assert_eq!((after.fused - before.fused, after.dequantized - before.dequantized), (12, 0), "x = [{batch}, {seq}, 64]");
        }
        close(&y, &values(reference.forward(TransformerEncoderInput::new(on_flex(&x)))), 1e-3, "against the dequantised model");
        let float = values(float.forward(TransformerEncoderInput::new(x)));
        let error = relative_error(&y, &float, &float);
        assert!(error > 1e-3 && error < 0.25, "against the float model: {error:e}");
    }
}

/// Below 1e-8 f16 scales leave nothing of a weight, and the report says so.
fn small(device: &Device) {
    let mut float = Mlp::new([64, 96, 32], LinearLayout::Row, true, device);
    float.down.weight = float.down.weight.map(|weight| weight.mul_scalar(1e-8));
    for (scales, underflows) in [(ScaleDtype::F16, [0, 2 * 32 + 32]), (ScaleDtype::BF16, [0, 0])] {
        let spec = QuantSpec::int4(GroupSize::G32).with_scale_dtype(scales);
        let (_, report) = W4A16::new(spec).quantize(float.clone()).unwrap_or_else(|error| panic!("{error}"));
        let found: Vec<usize> = report
            .layers
            .iter()
            .filter_map(|layer| match layer.outcome {
                Outcome::Quantized { underflows, .. } => Some(underflows),
                Outcome::Left(_) => None,
            })
            .collect();
        assert_eq!(found, underflows, "{report}");
        assert_eq!(format!("{report}").contains("1 layers have weights too small"), scales == ScaleDtype::F16, "{report}");
        assert!(report.to_json().contains(&format!("\"underflowing\":{}", u8::from(scales == ScaleDtype::F16))), "{}", report.to_json());
    }
}

fn half_precision(device: &Device) {
    for (dtype, scales, limit) in [(FloatDType::F16, ScaleDtype::F16, 3e-3), (FloatDType::BF16, ScaleDtype::BF16, 2e-2)] {
        if !computes(device, scales.into()) {
            continue;
        }
        // The second sizes are no multiples of a tile, and their K is no multiple of eight.
        let formats = [([128, 96, 64], GroupSize::G32), ([100, 76, 33], GroupSize::Channel), ([100, 76, 33], GroupSize::G32)]
            .into_iter()
            .flat_map(|(sizes, group)| widths(group).map(|(spec, _)| (sizes, spec.with_scale_dtype(scales))));
        for (sizes, spec) in formats {
            let float = cast(Mlp::new(sizes, LinearLayout::Row, true, device), dtype);
            let (model, report) = W4A16::new(spec).quantize(float).unwrap_or_else(|error| panic!("{error}"));
            let on_tensor_cores = |layer: &LayerReport| match &layer.outcome {
                Outcome::Quantized { plan, .. } => runs_on_tensor_cores(plan),
                Outcome::Left(_) => false,
            };
            // Cards from Ampere on; tests run on no other.
            let expected = *device == Device::cuda(0);
            assert!(report.layers.iter().all(|layer| on_tensor_cores(layer) == expected), "{report}");
            let reference = cast(model.clone().materialize(), FloatDType::F32).to_device(&Device::flex());
            for rows in [1, 5, 40] {
                let x = Tensor::<2>::random([rows, sizes[0]], Distribution::Normal(0.0, 1.0), device).cast(dtype);
                device.sync().unwrap_or_else(|error| panic!("{error:?}"));
                let before = fusion_count();
                let y = model.forward(x.clone());
                assert_eq!(y.dtype(), DType::from(dtype));
                let y = values(y);
                let after = fusion_count();
                if fuses(device) {
                    assert_eq!((after.fused - before.fused, after.dequantized - before.dequantized), (2, 0), "{rows} rows, {spec}");
                }
                close(&y, &values(reference.forward(on_flex(&x.cast(FloatDType::F32)))), limit, "half precision");
            }
        }
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
    let w4a16 = W4A16::new(QuantSpec::int4(GroupSize::G64));
    let outcome = |report: &burn_marlin::Report, path: &str| {
        report
            .layers
            .iter()
            .find(|layer| layer.path == path)
            .map(|layer| layer.outcome.clone())
            .unwrap_or_else(|| panic!("{path} is not in:\n{report}"))
    };
    let (_, report) = w4a16.clone().exclude("lm_head").quantize(tagger.clone()).unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(outcome(&report, "embedding.weight"), Outcome::Left(LeftReason::NotLinear)));
    assert!(matches!(outcome(&report, "lm_head.weight"), Outcome::Left(LeftReason::Excluded { .. })));
    assert!(matches!(outcome(&report, "body.up.weight"), Outcome::Quantized { .. }));
    // The embedding is not a linear layer, and not counted.
    assert_eq!((report.quantized(), report.left()), (2, 1));

    let (_, report) = w4a16.clone().include(r"^body\.").exclude("down").quantize(tagger.clone()).unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(outcome(&report, "lm_head.weight"), Outcome::Left(LeftReason::NotIncluded)));
    assert!(matches!(outcome(&report, "body.down.weight"), Outcome::Left(LeftReason::Excluded { .. })));
    assert_eq!(report.quantized(), 1);

    let parameters = tagger.num_params();
    let broken = w4a16.include("(").quantize(tagger);
    let broken = broken.err().unwrap_or_else(|| panic!("a pattern that is none was taken"));
    assert!(matches!(broken.error, Error::Pattern { .. }));
    assert_eq!(broken.model.num_params(), parameters, "the error gives the model back");
}

fn record(device: &Device) {
    let fresh = || Mlp::new([128, 96, 64], LinearLayout::Row, true, device);
    for (spec, _) in widths(GroupSize::G32) {
        let (model, _) = convert_to(spec, fresh());
        let x = Tensor::<2>::random([3, 128], Distribution::Normal(0.0, 1.0), device);
        let expected = values(model.forward(x.clone()));
        let bytes = model.clone().into_record().into_bytes().unwrap_or_else(|error| panic!("{error}"));
        // A float copy takes 32 bits a weight.
        assert!(bytes.len() < (128 * 96 + 96 * 64) * 2 * spec.bits.count() / 8, "{} bytes hold a float copy", bytes.len());
        let record = ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{error}"));
        let loaded = convert_to(spec, fresh()).0.try_load_record(record).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(values(loaded.forward(x.clone())), expected, "a reloaded model gives the same bits");
        assert_eq!(loaded.up.weight.shape().dims(), [128, 96]);
        let moved = model.to_device(&Device::flex());
        close(&values(moved.forward(on_flex(&x))), &expected, SAME_WEIGHTS, "moved to another backend");
    }
}

/// Checks models pruned to 2:4: what they compute, their records on the same device and on Flex, and a move there.
fn pruned(device: &Device) {
    let dtype = if *device == Device::flex() { FloatDType::F32 } else { FloatDType::F16 };
    for (spec, _) in widths(GroupSize::G64) {
        let fresh = || cast(Mlp::new([128, 64, 34], LinearLayout::Row, true, device), dtype);
        let float = fresh();
        let (model, report) = W4A16::new(spec).sparse24().quantize(float.clone()).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((report.quantized(), report.left()), (2, 0), "{report}");
        let formats = report.layers.iter().filter_map(|layer| match &layer.outcome {
            Outcome::Quantized { format, .. } => Some(format.sparsity),
            Outcome::Left(_) => None,
        });
        assert!(formats.into_iter().all(|sparsity| sparsity == Sparsity::TwoFour), "{report:#}");
        let reference = cast(dense(&model), FloatDType::F32);
        for (name, linear) in [("up", &reference.up), ("down", &reference.down)] {
            let [k, n] = linear.weight.dims();
            let weight: Vec<f32> = values(linear.weight.val()).into_iter().map(|value| value as f32).collect();
            assert_eq!(check_two_four(&weight, k, n), Ok(()), "{name}");
        }
        let x = Tensor::<2>::random([3, 128], Distribution::Normal(0.0, 1.0), device).cast(dtype);
        let expected = values(model.forward(x.clone()));
        let limit = if dtype == FloatDType::F32 { SAME_WEIGHTS } else { 3e-3 };
        close(&expected, &values(reference.forward(on_flex(&x).cast(FloatDType::F32))), limit, "against the dequantised model");

        let bytes = model.clone().into_record().into_bytes().unwrap_or_else(|error| panic!("{error}"));
        let record = || ModuleRecord::from_bytes(bytes.clone()).unwrap_or_else(|error| panic!("{error}"));
        // A model of another format takes the record's.
        let unloaded = |model: Mlp| W4A16::new(spec).unloaded(model).unwrap_or_else(|error| panic!("{error}")).0;
        let loaded = unloaded(fresh()).try_load_record(record()).unwrap_or_else(|error| panic!("{error}"));
        assert!(values(loaded.forward(x.clone())) == expected, "{spec}: a reloaded model gives the same bits");
        let flex = Device::flex();
        let on_host = unloaded(cast(Mlp::new([128, 64, 34], LinearLayout::Row, true, &flex), dtype));
        let on_host = on_host.try_load_record(record()).unwrap_or_else(|error| panic!("{error}"));
        close(&values(on_host.forward(on_flex(&x).cast(dtype))), &expected, limit, "loaded on Flex");
        let moved = model.to_device(&flex);
        close(&values(moved.forward(on_flex(&x).cast(dtype))), &expected, limit, "moved to Flex");
    }
    // Three of four rows cannot be pruned to two.
    let (_, report) = W4A16::new(QuantSpec::int4(GroupSize::Channel))
        .sparse24()
        .quantize(Mlp::new([66, 64, 8], LinearLayout::Row, true, device))
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(outcome(&report, "up.weight"), &Outcome::Left(LeftReason::Shape { error: FormatError::SparseRows { k: 66 } }), "{report:#}");
    assert!(matches!(outcome(&report, "down.weight"), Outcome::Quantized { .. }), "{report:#}");
}

fn gradient(device: &Device) {
    for (spec, _) in widths(GroupSize::G32) {
        gradient_of(spec, device);
    }
}

fn gradient_of(spec: QuantSpec, device: &Device) {
    let (model, _) = convert_to(spec, Mlp::new([64, 96, 32], LinearLayout::Row, true, device));
    let tracked = device.clone().autodiff();
    let x = Tensor::<2>::random([4, 64], Distribution::Normal(0.0, 1.0), device);
    let gradient_of = |model: &Mlp, x: Tensor<2>| {
        let x = x.require_grad();
        let gradients = model.forward(x.clone()).sum().backward();
        values(x.grad(&gradients).unwrap_or_else(|| panic!("no gradient reached the activations")))
    };
    let found = gradient_of(&Module::train(model.clone()), Tensor::from_data(x.to_data(), &tracked));
    let expected = gradient_of(&Module::train(dense(&model)), Tensor::from_data(x.to_data(), &Device::flex().autodiff()));
    close(&found, &expected, 2e-3, "gradient");
}

fn nan(device: &Device) {
    let mut model = Mlp::new([64, 64, 64], LinearLayout::Row, true, device);
    model.down.weight = model.down.weight.map(|weight| weight.mul_scalar(f32::NAN));
    let error = W4A16::new(QuantSpec::int4(GroupSize::G64)).quantize(model).err().unwrap_or_else(|| panic!("NaN weights were accepted"));
    assert!(error.to_string().starts_with("down.weight: "), "{error}");
}

fn twice(device: &Device) {
    let (model, _) = convert(Mlp::new([64, 96, 32], LinearLayout::Row, true, device), GroupSize::G32);
    let x = Tensor::<2>::random([3, 64], Distribution::Normal(0.0, 1.0), device);
    let expected = values(model.forward(x.clone()));
    let (again, report) = convert(model, GroupSize::G32);
    assert_eq!(report.quantized(), 0, "{report}");
    assert!(report.layers.iter().all(|layer| matches!(layer.outcome, Outcome::Left(LeftReason::Reparameterized))), "{report}");
    assert_eq!(values(again.forward(x)), expected);
}
