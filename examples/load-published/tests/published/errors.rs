//! Checks that checkpoints which do not fit the model are errors that name the tensors.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::store::KeyRemapper;
use burn::tensor::Device;
use burn_marlin::convert::LoadError;
use burn_marlin::{GroupSize, QuantSpec, WeightQuantizer};
use load_published::Bert;
use marlin_format::with_causes;
use safetensors::Dtype;

use crate::support::{config, edited, golden, model};

fn keys() -> KeyRemapper {
    Bert::from_transformers().unwrap()
}

/// Asserts that the message of an error and its causes contains all of `words`.
#[track_caller]
fn says(error: &dyn std::error::Error, words: &[&str]) {
    let message = with_causes(error);
    for word in words {
        assert!(message.contains(word), "`{word}` is not in: {message}");
    }
}

#[test]
fn a_folder_without_weights() {
    let folder = tempfile::tempdir().unwrap();
    let error = WeightQuantizer::load(model(), folder.path(), &keys()).unwrap_err();
    assert!(matches!(error, LoadError::Checkpoint(_)));
    says(
        &error,
        &["model.safetensors", folder.path().to_str().unwrap()],
    );
}

#[test]
fn a_layer_without_its_scales() {
    let folder = edited(|tensors| drop(tensors.remove("bert.pooler.dense.weight_scale")));
    let error = WeightQuantizer::load(model(), folder.path(), &keys()).unwrap_err();
    assert!(matches!(error, LoadError::Checkpoint(_)));
    says(
        &error,
        &[
            "bert.pooler.dense.weight_scale",
            folder.path().to_str().unwrap(),
        ],
    );
}

#[test]
fn parameters_without_a_tensor() {
    let error = WeightQuantizer::load(model(), golden(), &KeyRemapper::new()).unwrap_err();
    let LoadError::Missing {
        missing, unused, ..
    } = &error
    else {
        panic!("{error}")
    };
    // Only the classifier has the same name in the model and in the checkpoint.
    assert_eq!((missing.len(), unused.len()), (39, 39));
    assert!(
        missing.contains(&"encoder.layers.1.mha.query.weight".to_string()),
        "{missing:?}"
    );
    assert!(
        missing.contains(&"encoder.layers.0.norm_1.weight".to_string()),
        "{missing:?}"
    );
    assert!(
        unused.contains(&"bert.encoder.layer.1.attention.self.query.weight".to_string()),
        "{unused:?}"
    );
    says(
        &error,
        &[
            "39 parameters",
            "`words.weight`",
            "bert.embeddings.LayerNorm.bias",
            "key map",
            golden().to_str().unwrap(),
        ],
    );

    let folder = edited(|tensors| drop(tensors.remove("classifier.bias")));
    let error = WeightQuantizer::load(model(), folder.path(), &keys()).unwrap_err();
    let LoadError::Missing {
        missing, unused, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(missing, &["classifier.bias"]);
    assert!(unused.is_empty());
}

#[test]
fn two_tensors_of_one_name() {
    let keys = keys()
        .add_pattern(r"^encoder\.layers\.1\.", "encoder.layers.0.")
        .unwrap();
    let error = WeightQuantizer::load(model(), golden(), &keys).unwrap_err();
    let LoadError::SameName {
        first,
        second,
        name,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert!(
        first.starts_with("bert.encoder.layer.0.") && second.starts_with("bert.encoder.layer.1."),
        "{first}, {second}"
    );
    assert!(name.starts_with("encoder.layers.0."), "{name}");
    says(&error, &[first, second, name]);
}

#[test]
fn a_quantised_layer_of_another_shape() {
    let mut sizes = config();
    sizes.intermediate_size = 96;
    let error = WeightQuantizer::load(sizes.init(&Device::flex()), golden(), &keys()).unwrap_err();
    let LoadError::Shape {
        expected, found, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!((expected, found), (&vec![96, 64], &vec![128, 64]));
    says(
        &error,
        &[
            "bert.encoder.layer.0.intermediate.dense",
            "encoder.layers.0.pwff.linear_inner.weight",
            "[96, 64]",
            "[128, 64]",
            "model.safetensors",
        ],
    );
}

#[test]
fn a_float_tensor_of_another_shape() {
    for (change, tensor, expected, found) in [
        (
            0,
            "bert.embeddings.word_embeddings.weight",
            vec![97, 64],
            vec![96, 64],
        ),
        (1, "classifier.weight", vec![4, 64], vec![3, 64]),
    ] {
        let mut sizes = config();
        match change {
            0 => sizes.vocab_size += 1,
            _ => drop(sizes.id2label.insert("3".into(), "LABEL_3".into())),
        }
        let error =
            WeightQuantizer::load(sizes.init(&Device::flex()), golden(), &keys()).unwrap_err();
        let LoadError::Shape {
            tensor: name,
            expected: needs,
            found: has,
            ..
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!((name.as_str(), needs, has), (tensor, &expected, &found));
    }
}

#[test]
fn a_tensor_that_is_no_float() {
    let folder = edited(|tensors| {
        let (dtype, shape, data) = tensors.get_mut("classifier.bias").unwrap();
        (*dtype, *data) = (Dtype::I32, vec![0; 4 * shape[0]]);
    });
    let error = WeightQuantizer::load(model(), folder.path(), &keys()).unwrap_err();
    let LoadError::Dtype { found, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(*found, Dtype::I32);
    says(&error, &["`classifier.bias`", "I32", "floats"]);
}

#[derive(Module, Debug)]
struct Table {
    table: Embedding,
}

#[test]
fn a_quantised_layer_for_what_is_no_linear() {
    let model = Table {
        table: EmbeddingConfig::new(64, 64).init(&Device::flex()),
    };
    let keys = KeyRemapper::new()
        .add_pattern(r"^bert\.pooler\.dense\.", "table.")
        .unwrap();
    let error = WeightQuantizer::load(model, golden(), &keys).unwrap_err();
    assert!(matches!(error, LoadError::NotLinear { .. }));
    says(
        &error,
        &[
            "`bert.pooler.dense`",
            "pack-quantized int4 g32",
            "`table.weight`",
        ],
    );
}

#[derive(Module, Debug)]
struct Pooler {
    pooler: Linear,
}

#[test]
fn a_model_that_is_converted_already() {
    let model = Pooler {
        pooler: LinearConfig::new(64, 64).init(&Device::flex()),
    };
    let (model, _) = WeightQuantizer::new(QuantSpec::int4(GroupSize::G32))
        .quantize(model)
        .unwrap();
    let error = WeightQuantizer::load(model, golden(), &keys()).unwrap_err();
    assert!(matches!(error, LoadError::Reparameterized { .. }));
    says(&error, &["`pooler.weight`"]);
}
