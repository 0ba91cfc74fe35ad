//! Tests of quantization configs: samples in the form of published ones, every rule and every
//! refusal.

mod auto_round;
mod awq;
mod compressed_floats;
mod compressed_tensors;
mod files;
mod fp8;
mod gptq;
mod modelopt;

use marlin_format::checkpoint::{ConfigError, Quantization};
use serde_json::{Value, json};

use crate::common::message;

/// Reads a `config.json` with this `quantization_config`.
fn try_read(quantization: &Value) -> Result<Quantization, ConfigError> {
    let config =
        json!({ "architectures": ["LlamaForCausalLM"], "quantization_config": quantization })
            .to_string();
    Quantization::from_config(config.as_bytes())
        .map(|found| found.expect("it has a quantization config"))
}

fn read(quantization: &Value) -> Quantization {
    try_read(quantization).unwrap_or_else(|error| panic!("{quantization}: {}", message(&error)))
}

/// Checks the format of each of these layers.
#[track_caller]
fn expect_layers(quantization: &Quantization, expected: &[(&str, &str)]) {
    for (layer, format) in expected {
        assert_eq!(
            quantization.layer(layer).unwrap().to_string(),
            *format,
            "{layer}"
        );
    }
}

/// Returns the object with some of its fields changed. A null removes a field.
fn changed(object: &Value, fields: Value) -> Value {
    let mut object = object.clone();
    let map = object.as_object_mut().unwrap();
    for (field, value) in fields.as_object().unwrap() {
        map.insert(field.clone(), value.clone());
        map.retain(|_, value| !value.is_null());
    }
    object
}

/// Returns the object with the value at a JSON pointer changed.
fn changed_at(object: &Value, pointer: &str, value: Value) -> Value {
    let mut object = object.clone();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap()[field] = value;
    object
}

/// Checks that reading fails with exactly this message.
#[track_caller]
fn expect_refused(quantization: &Value, expected: &str) {
    let error = try_read(quantization).expect_err(expected);
    assert_eq!(message(&error), expected);
}

/// Checks for a refusal that names the field, its value and the accepted values.
#[track_caller]
fn expect_unsupported(quantization: &Value, field: &str, found: &str, expected: &str) {
    let expected = format!(
        "the quantization config's `{field}` is {found}; this version reads {expected}: use a checkpoint quantised so, or a float one"
    );
    expect_refused(quantization, &expected);
}
