//! Conversion of linear layers that share an id with other layers.

use super::{GROUP, Stack, burn_error, random, shared_layers};
use crate::convert::convert;
use crate::layer::values;
use crate::models::{Tied, Tried, with_same_id};
use burn::nn::LinearConfig;
use burn::store::{ModuleSnapshot, SafetensorsStore};
use burn::tensor::Device;
use burn_marlin::{QuantSpec, QuantizedWeight, WeightQuantizer};

/// Converts clones of one layer after each was loaded with other values from a file, which has no
/// ids. The fourth layer is a clone of the first, with the same values.
pub(super) fn loaded_apart(device: &Device) {
    let layer = LinearConfig::new(64, 64).with_bias(false).init(device);
    let source = Stack {
        layers: (0..4)
            .map(|_| with_same_id(&layer, random([64, 64], device)))
            .collect(),
    };
    let mut store = SafetensorsStore::from_bytes(None);
    source
        .save_into(&mut store)
        .unwrap_or_else(|error| panic!("{error}"));
    let bytes = store.get_bytes().unwrap_or_else(|error| panic!("{error}"));
    let mut stack = Stack {
        layers: vec![layer; 4],
    };
    stack
        .load_from(&mut SafetensorsStore::from_bytes(Some(bytes)))
        .unwrap_or_else(|error| panic!("{error}"));
    stack.layers[3] = stack.layers[0].clone();
    let float: Vec<Vec<f64>> = stack
        .layers
        .iter()
        .map(|layer| values(layer.weight.val()))
        .collect();
    let (stack, report) = convert(stack, GROUP);
    assert_eq!(
        (report.quantized(), shared_layers(&report)),
        (4, 1),
        "{report:#}"
    );
    for (index, (layer, float)) in stack.layers.iter().zip(&float).enumerate() {
        let error = burn_error(&values(layer.weight.val()), float);
        assert!(error < 0.12, "layer {index} has another weight: {error}");
    }
}

pub(super) fn tied(device: &Device) {
    let model = Tied::new(device);
    let [embedding, head] = [
        values(model.embedding.weight.val()),
        values(model.head.weight.val()),
    ];
    let (model, _) = convert(model, GROUP);
    assert!(
        values(model.embedding.weight.val()) == embedding,
        "the embedding stays as it is"
    );
    assert!(burn_error(&values(model.head.weight.val()), &head) < 0.12);
}

pub(super) fn excluded_twin(device: &Device) {
    let layer = LinearConfig::new(64, 64).init(device);
    let stack = Stack {
        layers: vec![
            layer.clone(),
            with_same_id(&layer, random([64, 64], device)),
        ],
    };
    let float: Vec<Vec<f64>> = stack
        .layers
        .iter()
        .map(|layer| values(layer.weight.val()))
        .collect();
    let (stack, report) = WeightQuantizer::new(QuantSpec::int4(GROUP))
        .exclude(r"layers\.0")
        .quantize(stack)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((report.quantized(), report.skipped()), (1, 1), "{report:#}");
    assert!(
        values(stack.layers[0].weight.val()) == float[0],
        "the excluded layer is float"
    );
    assert!(
        stack.layers[0]
            .weight
            .reparameterization::<QuantizedWeight>()
            .is_none()
    );
    let error = burn_error(&values(stack.layers[1].weight.val()), &float[1]);
    assert!(
        error > 0.0 && error < 0.12,
        "the other one is rounded: {error}"
    );
}
