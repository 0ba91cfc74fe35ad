//! Clones, moves, records, files and an optimiser step, which do not change the output of converted
//! models of several structures.

use super::{GROUP, burn_error, shared_layers};
use crate::convert::{SAME_WEIGHTS, SAME_WEIGHTS_IN_BURN, close, convert, dense, reset};
use crate::models::{Containers, Mlp, Shared, Tied, Tried};
use crate::setup::is_cpu_runtime;
use burn::module::Module;
use burn::nn::transformer::{TransformerDecoder, TransformerEncoder};
use burn::nn::{Gru, Lstm};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::{
    BurnToPyTorchAdapter, BurnpackStore, ModuleRecord, ModuleSnapshot, PyTorchToBurnAdapter,
    SafetensorsStore,
};
use burn::tensor::{Bytes, Device, Distribution, Tensor};

pub(super) fn of_linear_layers(device: &Device) {
    of_model::<Mlp>(device);
    of_model::<Shared>(device);
    of_model::<Tied>(device);
    of_model::<Containers>(device);
}

pub(super) fn of_burns_modules(device: &Device) {
    of_model::<TransformerEncoder>(device);
    of_model::<TransformerDecoder>(device);
    of_model::<Lstm>(device);
    of_model::<Gru>(device);
}

/// Checks that a converted model gives the same output after clones, moves, records, files and a
/// step of an optimiser.
fn of_model<T: Tried>(device: &Device) {
    let x = Tensor::<3>::random([2, 3, T::FEATURES], Distribution::Normal(0.0, 1.0), device);
    let float = T::new(device);
    let (parameters, unconverted) = (Module::num_params(&float), float.run(x.clone()));
    let (model, report) = convert(float, GROUP);
    let [linear, shared] = T::LINEAR;
    assert_eq!(
        (report.quantized(), report.skipped()),
        (linear, 0),
        "{}: {report:#}",
        T::NAME
    );
    assert_eq!(shared_layers(&report), shared, "{}: {report:#}", T::NAME);
    let expected = model.run(x.clone());
    assert_eq!(Module::num_params(&model), parameters, "{}", T::NAME);

    let check_within = |limit: f64, what: &str, model: &T, x: Tensor<3>| {
        let name = format!("{}, {what}", T::NAME);
        close(&model.run(x), &expected, limit, &name);
    };
    let check = |what: &str, model: &T, x: Tensor<3>| check_within(SAME_WEIGHTS, what, model, x);
    // How the outputs follow from the quantised values is what "dense on Flex" checks.
    assert!(
        burn_error(&expected, &unconverted) > 0.0,
        "{}: not quantised",
        T::NAME
    );
    check(
        "dense on Flex",
        &dense(&model),
        Tensor::from_data(x.to_data(), &Device::flex()),
    );
    check("clone", &model.clone(), x.clone());
    check("fork", &model.clone().fork(device), x.clone());
    check("valid", &model.valid(), x.clone());
    let there = model.clone().to_device(&Device::flex());
    check(
        "to Flex",
        &there,
        Tensor::from_data(x.to_data(), &Device::flex()),
    );
    check(
        "to Flex and back",
        &reset(there).to_device(device),
        x.clone(),
    );

    // Records and files are loaded into a model with other values.
    let target = || convert(T::new(device), GROUP).0;
    let bytes: Bytes = model
        .clone()
        .into_record()
        .into_bytes()
        .unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
    let record =
        ModuleRecord::from_bytes(bytes).unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
    check("record", &target().load_record(record), x.clone());
    let mut store = BurnpackStore::from_bytes(None);
    model
        .save_into(&mut store)
        .unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
    let bytes = store
        .get_bytes()
        .unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
    let mut loaded = target();
    loaded
        .load_from(&mut BurnpackStore::from_bytes(Some(bytes)))
        .unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
    check("burnpack", &loaded, x.clone());
    for adapter in [false, true] {
        let mut store = SafetensorsStore::from_bytes(None);
        if adapter {
            store = store.with_to_adapter(BurnToPyTorchAdapter);
        }
        model
            .save_into(&mut store)
            .unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
        let bytes = store
            .get_bytes()
            .unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
        let mut store = SafetensorsStore::from_bytes(Some(bytes));
        if adapter {
            store = store.with_from_adapter(PyTorchToBurnAdapter);
        }
        let mut loaded = target();
        loaded
            .load_from(&mut store)
            .unwrap_or_else(|error| panic!("{}: {error}", T::NAME));
        check(
            if adapter {
                "safetensors for PyTorch"
            } else {
                "safetensors"
            },
            &loaded,
            x.clone(),
        );
    }

    // Training: the optimiser leaves the packed weights unchanged.
    let trained = Module::train(model);
    // CubeCL's CPU runtime would take minutes to compile and time Burn's matmuls for every shape of
    // every model.
    if !is_cpu_runtime(device) {
        check_within(
            SAME_WEIGHTS_IN_BURN,
            "train",
            &trained,
            Tensor::from_data(x.to_data(), &device.clone().autodiff()),
        );
    }
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.1).init();
    let stepped = optimizer.step(0.0, trained, GradientsParams::new());
    check("AdamW with weight decay", &stepped.valid(), x);
}
