//! Converted models that are saved, loaded, cast, materialised, or read without `val()`.

mod float_checkpoints;
mod integer_dtypes;
mod parameters;

use crate::convert::{SAME_WEIGHTS_IN_BURN, cast, close, convert, convert_to, reset};
use crate::layer::values;
use crate::models::Mlp;
use crate::setup::{Named, trial};
use burn::module::Module;
use burn::nn::LinearLayout;
use burn::store::ModuleRecord;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_marlin::{
    ActivationDtype, GroupSize, QuantLinear, QuantLinearConfig, QuantSpec, WeightQuantizer,
};
use libtest_mimic::Trial;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(
        device,
        "loading::materialised_models_are_saved_whole",
        materialized,
    ));
    tests.push(trial(device, "loading::records_load_at_any_time", any_time));
    tests.push(trial(
        device,
        "loading::an_unloaded_model_takes_a_record",
        unloaded,
    ));
    tests.push(trial(
        device,
        "loading::float_checkpoints_are_rounded_or_refused",
        float_checkpoints::float_checkpoint,
    ));
    tests.push(trial(
        device,
        "loading::float_checkpoints_that_cannot_be_rounded_stay_float",
        float_checkpoints::unroundable,
    ));
    tests.push(trial(
        device,
        "loading::words_of_another_integer_dtype_are_refused",
        integer_dtypes::other_integers,
    ));
    tests.push(trial(
        device,
        "loading::the_placeholder_never_looks_like_a_weight",
        parameters::placeholder,
    ));
    tests.push(trial(
        device,
        "loading::one_number_of_parameters_always",
        parameters::parameters,
    ));
    tests.push(trial(
        device,
        "loading::casts_keep_the_weights",
        parameters::casts,
    ));
    tests.push(trial(
        device,
        "loading::burns_quantiser_passes_by",
        parameters::burn_quantizer,
    ));
    tests.push(trial(
        device,
        "loading::a_converted_linear_is_not_rounded_again",
        parameters::from_converted,
    ));
    tests.push(trial(
        device,
        "loading::f64_activations",
        parameters::double,
    ));
    // A backward pass takes minutes on CubeCL's CPU runtime.
    if device.name != "cpu" {
        tests.push(trial(
            device,
            "loading::training_beside_leaves_the_weights",
            parameters::trained_beside,
        ));
    }
}

/// Returns a model with other random weights than any before.
pub fn fresh(device: &Device) -> Mlp {
    Mlp::new([128, 96, 64], LinearLayout::Row, true, device)
}

/// Returns inputs of [`fresh`] models.
pub fn batch(device: &Device) -> Tensor<2> {
    Tensor::random([3, 128], Distribution::Normal(0.0, 1.0), device)
}

fn record_of<M: Module>(model: &M) -> ModuleRecord {
    let bytes = model
        .clone()
        .into_record()
        .into_bytes()
        .unwrap_or_else(|error| panic!("{error}"));
    ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{error}"))
}

/// Checks that a materialised weight is saved as float, and that a tensor which a user puts into
/// the parameter of a converted layer is saved as given.
fn materialized(device: &Device) {
    let (model, _) = convert(fresh(device), GroupSize::G32);
    let x = batch(device);
    let expected = values(model.forward(x.clone()));
    let mut dense = model.clone().materialize();
    let loaded = fresh(device).load_record(record_of(&dense));
    close(
        &values(loaded.forward(x.clone())),
        &expected,
        SAME_WEIGHTS_IN_BURN,
        "a saved materialised model",
    );
    let reloaded = dense.clone().load_record(record_of(&loaded));
    close(
        &values(reloaded.forward(x.clone())),
        &expected,
        SAME_WEIGHTS_IN_BURN,
        "a record loaded into a materialised model",
    );

    let new = Tensor::<2>::random([128, 96], Distribution::Normal(0.0, 1.0), device);
    let given = new.clone();
    dense.up.weight = dense.up.weight.map(move |_| given);
    let mut converted = model;
    let given = new.clone();
    converted.up.weight = converted.up.weight.map(move |_| given);
    for model in [&dense, &converted] {
        let saved = model.up.weight.transform_for_save().val();
        assert_eq!(saved.dims(), [128, 96]);
        assert!(
            values(saved) == values(new.clone()),
            "the new weight is saved"
        );
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
        ("an earlier load", |model, device| {
            model.load_record(record_of(&convert(fresh(device), GroupSize::G32).0))
        }),
        ("a cast to f16 and back", |model, _| {
            cast(cast(model, FloatDType::F16), FloatDType::F32)
        }),
    ];
    let (saved, _) = convert(fresh(device), GroupSize::G32);
    let x = batch(device);
    let expected = values(saved.forward(x.clone()));
    for (what, used) in uses {
        let model = used(convert(fresh(device), GroupSize::G32).0, device);
        let loaded = reset(model)
            .try_load_record(record_of(&saved))
            .unwrap_or_else(|error| panic!("after {what}: {error}"));
        assert!(
            values(loaded.forward(x.clone())) == expected,
            "after {what}"
        );
        // Without the reset of the placeholders, Burn either returns an error or loads the whole
        // record.
        let model = used(convert(fresh(device), GroupSize::G32).0, device);
        if let Ok(loaded) = model.try_load_record(record_of(&saved)) {
            assert!(
                values(loaded.forward(x.clone())) == expected,
                "after {what}, not reset"
            );
        }
    }
}

fn unloaded(device: &Device) {
    // The record has another group and bit width than the model was made for; the record's format
    // is used.
    let (saved, _) = convert_to(
        QuantSpec::int8(GroupSize::G32).with_zero_points(),
        fresh(device),
    );
    let x = batch(device);
    let (empty, report) = WeightQuantizer::new(QuantSpec::int4(GroupSize::G64))
        .unloaded(fresh(device))
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(report.quantized(), 2, "{report}");
    assert!(
        values(empty.clone().forward(x.clone()))
            .iter()
            .all(|value| value.is_nan()),
        "no values that look right"
    );
    let loaded = reset(empty)
        .try_load_record(record_of(&saved))
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(
        values(loaded.forward(x.clone())) == values(saved.forward(x)),
        "the record is what is computed"
    );

    let layer = QuantLinearConfig::new(64, 40, QuantSpec::int4(GroupSize::G32))
        .with_activations(Some(ActivationDtype::F32))
        .init(device);
    let layer = layer.unwrap_or_else(|error| panic!("{error}"));
    let linear = burn::nn::LinearConfig::new(64, 40).init(device);
    let saved = QuantLinear::from_linear(&linear, &QuantSpec::int4(GroupSize::G64))
        .unwrap_or_else(|error| panic!("{error}"));
    let loaded = layer
        .try_load_record(record_of(&saved))
        .unwrap_or_else(|error| panic!("{error}"));
    let x = Tensor::<2>::random([3, 64], Distribution::Normal(0.0, 1.0), device);
    assert!(
        values(loaded.forward(x.clone())) == values(saved.forward(x)),
        "the record is what is computed"
    );
}
