//! Converted models that are saved, loaded, cast, materialised, or read without `val()`.

use crate::convert::{SAME_WEIGHTS_IN_BURN, cast, close, convert, convert_to, dense, on_flex, reset};
use crate::layer::values;
use crate::models::Mlp;
use crate::setup::{Named, computes, float_dtype, trial};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Quantizer};
use burn::nn::LinearLayout;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::{ModuleRecord, ModuleSnapshot, SafetensorsStore};
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, IntDType, Tensor};
use burn_marlin::convert::reset_placeholders;
use burn_marlin::{ActivationDtype, Error, GroupSize, QuantLinear, QuantSpec, QuantizedWeight, ScaleDtype, W4A16};
use libtest_mimic::Trial;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(device, "loading::materialised_models_are_saved_whole", materialized));
    tests.push(trial(device, "loading::records_load_at_any_time", any_time));
    tests.push(trial(device, "loading::an_unloaded_model_takes_a_record", unloaded));
    tests.push(trial(device, "loading::float_checkpoints_are_rounded_or_refused", float_checkpoint));
    tests.push(trial(device, "loading::float_checkpoints_that_cannot_be_rounded_stay_float", unroundable));
    tests.push(trial(device, "loading::words_of_another_integer_dtype_are_refused", other_integers));
    tests.push(trial(device, "loading::the_placeholder_never_looks_like_a_weight", placeholder));
    tests.push(trial(device, "loading::one_number_of_parameters_always", parameters));
    tests.push(trial(device, "loading::casts_keep_the_weights", casts));
    tests.push(trial(device, "loading::burns_quantiser_passes_by", burn_quantizer));
    tests.push(trial(device, "loading::a_converted_linear_is_not_rounded_again", from_converted));
    tests.push(trial(device, "loading::f64_activations", double));
    // A backward pass takes minutes on CubeCL's CPU runtime.
    if device.name != "cpu" {
        tests.push(trial(device, "loading::training_beside_leaves_the_weights", trained_beside));
    }
}

fn fresh(device: &Device) -> Mlp {
    Mlp::new([128, 96, 64], LinearLayout::Row, true, device)
}

fn batch(device: &Device) -> Tensor<2> {
    Tensor::random([3, 128], Distribution::Normal(0.0, 1.0), device)
}

fn record_of<M: Module>(model: &M) -> ModuleRecord {
    let bytes = model.clone().into_record().into_bytes().unwrap_or_else(|error| panic!("{error}"));
    ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{error}"))
}

/// Checks that a materialised weight is saved as float, and also a tensor that a user puts into the parameter of a converted layer.
fn materialized(device: &Device) {
    let (model, _) = convert(fresh(device), GroupSize::G32);
    let x = batch(device);
    let expected = values(model.forward(x.clone()));
    let mut dense = model.clone().materialize();
    let loaded = fresh(device).load_record(record_of(&dense));
    close(&values(loaded.forward(x.clone())), &expected, SAME_WEIGHTS_IN_BURN, "a saved materialised model");
    let reloaded = dense.clone().load_record(record_of(&loaded));
    close(&values(reloaded.forward(x.clone())), &expected, SAME_WEIGHTS_IN_BURN, "a record loaded into a materialised model");

    let new = Tensor::<2>::random([128, 96], Distribution::Normal(0.0, 1.0), device);
    let given = new.clone();
    dense.up.weight = dense.up.weight.map(move |_| given);
    let mut converted = model;
    let given = new.clone();
    converted.up.weight = converted.up.weight.map(move |_| given);
    for model in [&dense, &converted] {
        let saved = model.up.weight.transform_for_save().val();
        assert_eq!(saved.dims(), [128, 96]);
        assert!(values(saved) == values(new.clone()), "the new weight is saved");
    }
}

/// Checks that a record can be loaded after each use that reads the placeholder.
fn any_time(device: &Device) {
    type Use = fn(Mlp, &Device) -> Mlp;
    let uses: [(&str, Use); 7] = [
        ("nothing", |model, _| model),
        ("a forward pass", |model, device| {
            let _ = values(model.forward(batch(device)));
            model
        }),
        ("Display", |model, _| {
            assert!(model.to_string().contains("d_input: 128"), "{model}");
            model
        }),
        ("valid", |model, _| model.valid()),
        ("a clone that was saved", |model, _| {
            let _ = model.clone().into_record();
            model
        }),
        ("an earlier load", |model, device| model.load_record(record_of(&convert(fresh(device), GroupSize::G32).0))),
        ("a cast to f16 and back", |model, _| cast(cast(model, FloatDType::F16), FloatDType::F32)),
    ];
    let (saved, _) = convert(fresh(device), GroupSize::G32);
    let x = batch(device);
    let expected = values(saved.forward(x.clone()));
    for (what, used) in uses {
        let model = used(convert(fresh(device), GroupSize::G32).0, device);
        let loaded = reset(model).try_load_record(record_of(&saved)).unwrap_or_else(|error| panic!("after {what}: {error}"));
        assert!(values(loaded.forward(x.clone())) == expected, "after {what}");
        // Without the reset, Burn either returns an error or loads the whole record.
        let model = used(convert(fresh(device), GroupSize::G32).0, device);
        if let Ok(loaded) = model.try_load_record(record_of(&saved)) {
            assert!(values(loaded.forward(x.clone())) == expected, "after {what}, not reset");
        }
    }
}

fn unloaded(device: &Device) {
    // The record has another group and width than the model was made for; its format is used.
    let (saved, _) = convert_to(QuantSpec::int8(GroupSize::G32).with_zero_points(), fresh(device));
    let x = batch(device);
    let (empty, report) = W4A16::new(QuantSpec::int4(GroupSize::G64)).unloaded(fresh(device)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.quantized(), 2, "{report}");
    assert!(values(empty.clone().forward(x.clone())).iter().all(|value| value.is_nan()), "no values that look right");
    let loaded = reset(empty).try_load_record(record_of(&saved)).unwrap_or_else(|error| panic!("{error}"));
    assert!(values(loaded.forward(x.clone())) == values(saved.forward(x)), "the record is what is computed");

    let layer = QuantLinear::unloaded([64, 40], true, QuantSpec::int4(GroupSize::G32), ActivationDtype::F32, device);
    let layer = layer.unwrap_or_else(|error| panic!("{error}"));
    let linear = burn::nn::LinearConfig::new(64, 40).init(device);
    let saved = QuantLinear::from_linear(&linear, &QuantSpec::int4(GroupSize::G64)).unwrap_or_else(|error| panic!("{error}"));
    let loaded = layer.try_load_record(record_of(&saved)).unwrap_or_else(|error| panic!("{error}"));
    let x = Tensor::<2>::random([3, 64], Distribution::Normal(0.0, 1.0), device);
    assert!(values(loaded.forward(x.clone())) == values(saved.forward(x)), "the record is what is computed");
}

/// Loads a float checkpoint by a record and by a store, before and after the first use of the model.
fn float_checkpoint(device: &Device) {
    let (float, x) = (fresh(device), batch(device));
    let expected = values(convert(float.clone(), GroupSize::G32).0.forward(x.clone()));
    for used in [false, true] {
        let model = || {
            let (model, _) = convert(fresh(device), GroupSize::G32);
            if used {
                let _ = values(model.forward(x.clone()));
            }
            model
        };
        if let Ok(loaded) = model().try_load_record(record_of(&float).allow_partial(true)) {
            assert!(used, "a fresh converted model has no place for float weights");
            close(&values(loaded.forward(x.clone())), &expected, 1e-6, "a float record, rounded");
            // Resetting the placeholders removes the float values; the packed weights stay.
            let reset = reset(loaded);
            assert!(reset.up.weight.lazy_shape().num_elements() == 1, "the float values are gone");
            close(&values(reset.forward(x.clone())), &expected, 1e-6, "rounded, and reset");
        }
        let mut store = SafetensorsStore::from_bytes(None);
        float.save_into(&mut store).unwrap_or_else(|error| panic!("{error}"));
        let bytes = store.get_bytes().unwrap_or_else(|error| panic!("{error}"));
        let mut loaded = model();
        match loaded.load_from(&mut SafetensorsStore::from_bytes(Some(bytes)).allow_partial(true)) {
            Ok(_) => close(&values(loaded.forward(x.clone())), &expected, 1e-6, "a float file, rounded"),
            Err(error) => assert!(!used, "{error}"),
        }
    }
}

/// Loads float checkpoints whose weights no quantised one can hold into a converted model that was used.
fn unroundable(device: &Device) {
    let x = batch(device);
    type Edit = fn(Tensor<2>) -> Tensor<2>;
    let edits: [(&str, Edit); 3] = [
        ("a first row that is not a number", |weight| {
            let [_, n] = weight.dims();
            let row = Tensor::full([1, n], f32::NAN, &weight.device());
            weight.slice_assign([0..1, 0..n], row)
        }),
        ("no number at all", |weight| weight.mul_scalar(f32::NAN)),
        ("scales that overflow f16", |weight| weight.mul_scalar(1e8)),
    ];
    for (what, edit) in edits {
        let mut float = fresh(device);
        float.up.weight = float.up.weight.map(edit);
        let (model, _) = convert(fresh(device), GroupSize::G32);
        let _ = values(model.forward(x.clone()));
        let loaded = model.try_load_record(record_of(&float).allow_partial(true)).unwrap_or_else(|error| panic!("{what}: {error}"));
        let (expected, kept) = (values(float.up.weight.val()), |model: &Mlp| values(model.up.weight.val()));
        // Infinite in place of one value where none is a number.
        let same = |found: Vec<f64>| {
            found.iter().zip(&expected).all(|(found, &value)| if value.is_nan() { !found.is_finite() } else { *found == value })
        };
        assert!(same(kept(&loaded)), "{what}: the layer is float");
        let refused = reset_placeholders(loaded).err().unwrap_or_else(|| panic!("{what}: accepted"));
        assert!(refused.error.to_string().starts_with("up.weight: "), "{what}: {}", refused.error);
        assert!(same(kept(&refused.model)), "{what}: the layer is still float");
        let down = values(refused.model.down.weight.val());
        assert!(down.iter().all(|value| value.is_finite()), "{what}: the other layer is rounded");
    }
}

/// The tensors of a record of a `QuantLinear` without a bias, its words in another dtype.
#[derive(Module, Debug)]
struct Recorded {
    weight: RecordedWeight,
}

#[derive(Module, Debug)]
struct RecordedWeight {
    format: Param<Tensor<1>>,
    words: Param<Tensor<2, Int>>,
    scales: Param<Tensor<2, Int>>,
}

impl Recorded {
    fn of(layer: &QuantLinear, words: IntDType, scales: IntDType) -> Self {
        #[derive(Default)]
        struct Tensors(Vec<Tensor<1>>, Vec<Tensor<2, Int>>);
        impl ModuleVisitor for Tensors {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.push(param.val().flatten(0, D - 1));
            }
            fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
                self.1.push(param.val().reshape(<[usize; 2]>::try_from(param.dims().as_slice()).unwrap_or_else(|_| panic!("no matrix"))));
            }
        }
        let mut tensors = Tensors::default();
        layer.visit(&mut tensors);
        let parameter = |index: usize, dtype| Param::initialized(ParamId::new(), tensors.1[index].clone().cast(dtype));
        let format = Param::initialized(ParamId::new(), tensors.0[0].clone());
        Self { weight: RecordedWeight { format, words: parameter(0, words), scales: parameter(1, scales) } }
    }
}

fn other_integers(device: &Device) {
    let spec = QuantSpec::int4(GroupSize::G32);
    let linear = burn::nn::LinearConfig::new(64, 40).with_bias(false).init(device);
    let layer = QuantLinear::from_linear(&linear, &spec).unwrap_or_else(|error| panic!("{error}"));
    let x = Tensor::<2>::random([3, 64], Distribution::Normal(0.0, 1.0), device);
    let expected = values(layer.forward(x.clone()));
    let target = || QuantLinear::unloaded([64, 40], false, spec, ActivationDtype::F32, device).unwrap_or_else(|error| panic!("{error}"));
    for (words, scales) in [(IntDType::I32, IntDType::I32), (IntDType::I64, IntDType::I32), (IntDType::I32, IntDType::I64)] {
        let recorded = Recorded::of(&layer, words, scales);
        let loaded = target().try_load_record(record_of(&recorded));
        let mut store = SafetensorsStore::from_bytes(None);
        recorded.save_into(&mut store).unwrap_or_else(|error| panic!("{error}"));
        let bytes = store.get_bytes().unwrap_or_else(|error| panic!("{error}"));
        let mut from_file = target();
        let read = from_file.load_from(&mut SafetensorsStore::from_bytes(Some(bytes)));
        if (words, scales) == (IntDType::I32, IntDType::I32) {
            let loaded = loaded.unwrap_or_else(|error| panic!("{error}"));
            assert!(read.is_ok() && values(loaded.forward(x.clone())) == expected && values(from_file.forward(x.clone())) == expected);
            continue;
        }
        let name = if words == IntDType::I64 { "weight.words" } else { "weight.scales" };
        let error = loaded.err().unwrap_or_else(|| panic!("a record of {words:?} and {scales:?} was loaded"));
        assert!(error.to_string().contains(name), "{error}");
        let error = read.err().unwrap_or_else(|| panic!("a file of {words:?} and {scales:?} was loaded"));
        assert!(error.to_string().contains(name) && error.to_string().contains("I64"), "{error}");
        // Part of a record may be missing: the layer keeps what it has.
        let kept = layer.clone().try_load_record(record_of(&recorded).allow_partial(true)).unwrap_or_else(|error| panic!("{error}"));
        assert!(values(kept.forward(x.clone())) == expected);
    }
    // A mapper of all integers, which no error stops.
    struct Widen;
    impl ModuleMapper for Widen {
        fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
            param.map(|tensor| tensor.cast(IntDType::I64))
        }
    }
    assert!(values(layer.map(&mut Widen).forward(x)) == expected, "cast to i64");
}

fn placeholder(device: &Device) {
    let (model, _) = convert(fresh(device), GroupSize::G32);
    assert_eq!(model.up.weight.dims(), [128, 96], "code that asks for the weight's shape gets it");
    let all_nan = |tensor: Tensor<2>| values(tensor).iter().all(|value| value.is_nan());
    assert!(all_nan(model.up.weight.base()));
    assert!(all_nan(model.up.weight.clone().into_value()));
    let mut model = model;
    assert!(!values(model.up.weight.val()).iter().any(|value| value.is_nan()), "val() is the weight");
    model.up.weight = model.up.weight.map(|tensor| tensor);
    assert!(all_nan(model.forward(batch(device))), "a layer whose weight was lost computes nothing that looks right");
}

fn parameters(device: &Device) {
    let float = fresh(device);
    let expected = float.num_params();
    let (model, _) = convert(float, GroupSize::G32);
    assert_eq!(model.num_params(), expected, "after the conversion");
    let clone = model.clone();
    let _ = values(model.forward(batch(device)));
    assert_eq!(model.num_params(), expected, "after a forward pass");
    assert_eq!(clone.num_params(), expected, "of a clone");
    let fresh_again = convert(fresh(device), GroupSize::G32).0;
    let other = fresh_again.clone();
    let loaded = fresh_again.load_record(record_of(&model));
    assert_eq!((loaded.num_params(), other.num_params()), (expected, expected), "after a load, and of a clone from before it");
    assert_eq!(loaded.valid().num_params(), expected, "of a valid model");
    assert_eq!(reset(loaded).num_params(), expected, "with new placeholders");
    assert_eq!(model.materialize().num_params(), expected, "materialised");
}

fn weight_of(model: &Mlp) -> &QuantizedWeight {
    model.up.weight.reparameterization().unwrap_or_else(|| panic!("no quantised weight"))
}

fn casts(device: &Device) {
    for scales in [ScaleDtype::F16, ScaleDtype::BF16, ScaleDtype::F32] {
        let (model, _) = convert_to(QuantSpec::int4(GroupSize::G32).with_scale_dtype(scales), fresh(device));
        let expected = weight_of(&model).to_plain().unwrap_or_else(|error| panic!("{error}"));
        let dtypes = [ActivationDtype::F16, ActivationDtype::BF16];
        for dtype in dtypes.into_iter().filter(|&dtype| computes(device, dtype)).map(float_dtype) {
            let there = cast(model.clone(), dtype);
            assert_eq!(there.up.weight.val().dtype(), DType::from(dtype), "activations are in the new dtype");
            let back = cast(there, FloatDType::F32);
            assert_eq!(weight_of(&back).to_plain().ok().as_ref(), Some(&expected), "scales in {scales}, cast to {dtype:?} and back");
        }
    }
}

fn burn_quantizer(device: &Device) {
    let (model, _) = convert(fresh(device), GroupSize::G32);
    let expected = weight_of(&model).to_plain().ok();
    let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
    let quantized = model.quantize_weights(&mut Quantizer::new(Calibration::MinMax, scheme));
    assert_eq!(weight_of(&quantized).to_plain().ok(), expected, "the packed weight stays");
    let weight = quantized.up.weight.val();

    let found = weight_of(&quantized).dequantize(FloatDType::from(weight.dtype()));
    assert!(values(weight) == values(found), "and is what val() gives");
}

fn from_converted(device: &Device) {
    let spec = QuantSpec::int4(GroupSize::G32);
    let (model, _) = convert_to(spec, fresh(device));
    let layer = QuantLinear::from_linear(&model.up, &spec).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(layer.weight().to_plain().ok(), weight_of(&model).to_plain().ok());
    let other = QuantLinear::from_linear(&model.up, &QuantSpec::int4(GroupSize::G64));
    assert!(matches!(other, Err(Error::Converted { found, .. }) if found == spec));
}

/// Checks activations in f64, which are computed from the dequantised weights.
fn double(device: &Device) {
    if !device.supports_dtype(FloatDType::F64) {
        return;
    }
    let float = cast(fresh(device), FloatDType::F64);
    let (model, report) = convert(float, GroupSize::G32);
    assert_eq!(report.quantized(), 2, "{report}");
    let x = batch(device).cast(FloatDType::F64);
    let y = model.forward(x.clone());
    assert_eq!(y.dtype(), DType::F64);
    let dense = dense(&model);
    close(&values(y), &values(dense.forward(on_flex(&x).cast(FloatDType::F64))), 1e-6, "f64");
    let layer = QuantLinear::from_linear(&model.up, &QuantSpec::int4(GroupSize::G32)).unwrap_or_else(|error| panic!("{error}"));
    close(&values(layer.forward(x.clone())), &values(model.up.forward(x)), 1e-6, "QuantLinear in f64");
}

/// Trains the biases with AdamW and weight decay: the packed weights neither decay nor get gradients.
fn trained_beside(device: &Device) {
    if !computes(device, ActivationDtype::F32) {
        return;
    }
    let (model, _) = convert(fresh(device), GroupSize::G32);
    let expected = weight_of(&model).to_plain().ok();
    let mut model = Module::train(model);
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.1).init();
    let x = Tensor::<2>::from_data(batch(device).to_data(), &device.clone().autodiff());
    let before = values(model.up.bias.clone().map_or_else(|| panic!("a bias"), |bias| bias.val()));
    for _ in 0..2 {
        let gradients = model.forward(x.clone()).powi_scalar(2).mean().backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(0.01, model, gradients);
    }
    let after = values(model.up.bias.clone().map_or_else(|| panic!("a bias"), |bias| bias.val()));
    assert_ne!(before, after, "the bias is trained");
    assert_eq!(weight_of(&model).to_plain().ok(), expected, "the weight is not");
}
