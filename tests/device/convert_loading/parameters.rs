//! The parameters of converted models: placeholders, their number, and the packed weights under
//! casts, Burn's quantiser and training.

use super::{batch, fresh, record_of};
use crate::convert::{cast, close, convert, convert_to, dense, on_flex, reset};
use crate::layer::values;
use crate::models::Mlp;
use crate::setup::{computes, float_dtype};
use burn::module::{Module, Quantizer};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_marlin::{
    ActivationDtype, Error, GroupSize, QuantLinear, QuantSpec, QuantizedWeight, ScaleDtype,
};

pub(super) fn placeholder(device: &Device) {
    let (model, _) = convert(fresh(device), GroupSize::G32);
    assert_eq!(
        model.up.weight.dims(),
        [128, 96],
        "code that asks for the weight's shape gets it"
    );
    let all_nan = |tensor: Tensor<2>| values(tensor).iter().all(|value| value.is_nan());
    assert!(all_nan(model.up.weight.base()));
    assert!(all_nan(model.up.weight.clone().into_value()));
    let mut model = model;
    assert!(
        !values(model.up.weight.val())
            .iter()
            .any(|value| value.is_nan()),
        "val() is the weight"
    );
    model.up.weight = model.up.weight.map(|tensor| tensor);
    assert!(
        all_nan(model.forward(batch(device))),
        "a layer whose weight was lost computes nothing that looks right"
    );
}

pub(super) fn parameters(device: &Device) {
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
    assert_eq!(
        (loaded.num_params(), other.num_params()),
        (expected, expected),
        "after a load, and of a clone from before it"
    );
    assert_eq!(loaded.valid().num_params(), expected, "of a valid model");
    assert_eq!(
        reset(loaded).num_params(),
        expected,
        "with new placeholders"
    );
    assert_eq!(model.materialize().num_params(), expected, "materialised");
}

fn weight_of(model: &Mlp) -> &QuantizedWeight {
    model
        .up
        .weight
        .reparameterization()
        .unwrap_or_else(|| panic!("no quantised weight"))
}

pub(super) fn casts(device: &Device) {
    for scales in [ScaleDtype::F16, ScaleDtype::BF16, ScaleDtype::F32] {
        let (model, _) = convert_to(
            QuantSpec::int4(GroupSize::G32).with_scale_dtype(scales),
            fresh(device),
        );
        let expected = weight_of(&model)
            .to_plain()
            .unwrap_or_else(|error| panic!("{error}"));
        let dtypes = [ActivationDtype::F16, ActivationDtype::BF16];
        for dtype in dtypes
            .into_iter()
            .filter(|&dtype| computes(device, dtype))
            .map(float_dtype)
        {
            let there = cast(model.clone(), dtype);
            assert_eq!(
                there.up.weight.val().dtype(),
                DType::from(dtype),
                "activations are in the new dtype"
            );
            let back = cast(there, FloatDType::F32);
            assert_eq!(
                weight_of(&back).to_plain().ok().as_ref(),
                Some(&expected),
                "scales in {scales}, cast to {dtype:?} and back"
            );
        }
    }
}

pub(super) fn burn_quantizer(device: &Device) {
    let (model, _) = convert(fresh(device), GroupSize::G32);
    let expected = weight_of(&model).to_plain().ok();
    let scheme = device
        .settings()
        .quantization
        .scheme
        .with_value(QuantValue::Q8S);
    let quantized = model.quantize_weights(&mut Quantizer::new(Calibration::MinMax, scheme));
    assert_eq!(
        weight_of(&quantized).to_plain().ok(),
        expected,
        "the packed weight stays"
    );
    let weight = quantized.up.weight.val();

    let found = weight_of(&quantized).dequantize(FloatDType::from(weight.dtype()));
    assert!(values(weight) == values(found), "and is what val() gives");
}

pub(super) fn from_converted(device: &Device) {
    let spec = QuantSpec::int4(GroupSize::G32);
    let (model, _) = convert_to(spec, fresh(device));
    let layer =
        QuantLinear::from_linear(&model.up, &spec).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        layer.weight().to_plain().ok(),
        weight_of(&model).to_plain().ok()
    );
    let other = QuantLinear::from_linear(&model.up, &QuantSpec::int4(GroupSize::G64));
    assert!(matches!(other, Err(Error::Converted { found, .. }) if found == spec));
}

/// Checks activations in f64, which are computed from the dequantised weights.
pub(super) fn double(device: &Device) {
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
    close(
        &values(y),
        &values(dense.forward(on_flex(&x).cast(FloatDType::F64))),
        1e-6,
        "f64",
    );
    let layer = QuantLinear::from_linear(&model.up, &QuantSpec::int4(GroupSize::G32))
        .unwrap_or_else(|error| panic!("{error}"));
    close(
        &values(layer.forward(x.clone())),
        &values(model.up.forward(x)),
        1e-6,
        "QuantLinear in f64",
    );
}

/// Trains the biases with AdamW and weight decay, and checks that the packed weights neither decay
/// nor get gradients.
pub(super) fn trained_beside(device: &Device) {
    if !computes(device, ActivationDtype::F32) {
        return;
    }
    let (model, _) = convert(fresh(device), GroupSize::G32);
    let expected = weight_of(&model).to_plain().ok();
    let mut model = Module::train(model);
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.1).init();
    let x = Tensor::<2>::from_data(batch(device).to_data(), &device.clone().autodiff());
    let before = values(
        model
            .up
            .bias
            .clone()
            .map_or_else(|| panic!("a bias"), |bias| bias.val()),
    );
    for _ in 0..2 {
        let gradients = model.forward(x.clone()).powi_scalar(2).mean().backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(0.01, model, gradients);
    }
    let after = values(
        model
            .up
            .bias
            .clone()
            .map_or_else(|| panic!("a bias"), |bias| bias.val()),
    );
    assert_ne!(before, after, "the bias is trained");
    assert_eq!(
        weight_of(&model).to_plain().ok(),
        expected,
        "the weight is not"
    );
}
