//! Checkpoints that `WeightQuantizer::export` writes and `WeightQuantizer::load` reads.

use crate::convert::convert_to;
use crate::convert_loading::{batch, fresh};
use crate::convert_models::outcome;
use crate::layer::values;
use crate::setup::{Named, trial};
use burn::backend::Flex;
use burn::module::{Lora, Module};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::store::KeyRemapper;
use burn::tensor::{Device, Tensor};
use burn_marlin::convert::{LoadError, LoadOptions, Outcome, SkipReason};
use burn_marlin::{
    ActivationDtype, GroupSize, QuantLinear, QuantLinearConfig, QuantSpec, WeightQuantizer,
};
use libtest_mimic::Trial;
use std::path::PathBuf;
use tempfile::TempDir;

pub fn add(tests: &mut Vec<Trial>, device: &Named) {
    tests.push(trial(
        device,
        "checkpoints::an_exported_model_loads_into_a_float_one",
        exported,
    ));
    tests.push(trial(
        device,
        "checkpoints::an_exported_quant_linear_loads_into_one",
        exported_layer,
    ));
    tests.push(trial(
        device,
        "checkpoints::parameters_may_be_missing_where_an_option_says_so",
        missing,
    ));
    // Only tensors of Flex give access to their strides.
    if device.name == "flex" {
        tests.push(trial(
            device,
            "checkpoints::float_linears_are_contiguous",
            contiguous,
        ));
    }
}

/// Exports a model to a folder, which exists as long as the returned guard.
fn folder<M: Module>(model: &M) -> (TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let dir = parent.path().join("exported");
    WeightQuantizer::export(model, &dir, &KeyRemapper::new())
        .unwrap_or_else(|error| panic!("{error}"));
    (parent, dir)
}

fn exported(device: &Device) {
    let x = batch(device);
    // The second layer's 96 rows are one group of 64 and an incomplete group.
    let asymmetric =
        [GroupSize::Channel, GroupSize::G64].map(|group| QuantSpec::int4(group).with_zero_points());
    for spec in [
        QuantSpec::int4(GroupSize::G32),
        QuantSpec::int8(GroupSize::G32),
    ]
    .into_iter()
    .chain(asymmetric)
    {
        let (converted, _) = convert_to(spec, fresh(device));
        let (_parent, dir) = folder(&converted);
        let (loaded, report) = WeightQuantizer::load(fresh(device), &dir, &KeyRemapper::new())
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(
            (report.quantized(), report.unused.len()),
            (2, 0),
            "{report}"
        );
        assert!(
            values(loaded.forward(x.clone())) == values(converted.forward(x.clone())),
            "{spec}: the weights are the file's"
        );
    }
}

/// A model whose type has a quantised layer after a float layer.
#[derive(Module, Debug)]
struct Written {
    first: Linear,
    layer: QuantLinear,
}

impl Written {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layer.forward(self.first.forward(x))
    }
}

fn exported_layer(device: &Device) {
    let (int4, int8) = (
        QuantSpec::int4(GroupSize::G32),
        QuantSpec::int8(GroupSize::G64).with_zero_points(),
    );
    for (spec, bias) in [(int4, true), (int8, false)] {
        let fresh = || {
            let linear = |n, bias| {
                LinearConfig::new(if n == 96 { 128 } else { 96 }, n)
                    .with_bias(bias)
                    .init(device)
            };
            let layer = QuantLinear::from_linear(&linear(40, bias), &spec)
                .unwrap_or_else(|error| panic!("{error}"));
            Written {
                first: linear(96, true),
                layer,
            }
        };
        let (model, x) = (fresh(), batch(device));
        let expected = values(model.forward(x.clone()));
        let (_parent, dir) = folder(&model);
        let load = |model| WeightQuantizer::load(model, &dir, &KeyRemapper::new());
        // Into one with other values, and into one that has none and was made for another format.
        let unloaded = QuantLinearConfig::new(96, 40, int4)
            .with_bias(bias)
            .with_activations(Some(ActivationDtype::F32))
            .init(device)
            .unwrap_or_else(|error| panic!("{error}"));
        for into in [
            fresh(),
            Written {
                layer: unloaded,
                ..fresh()
            },
        ] {
            let (loaded, report) = load(into).unwrap_or_else(|error| panic!("{error}"));
            assert!(
                matches!(outcome(&report, "layer.weight"), Outcome::Quantized { format, .. } if format.spec == spec),
                "{report:#}"
            );
            assert!(report.unused.is_empty(), "{report}");
            assert_eq!(
                loaded.layer.weight().to_plain().ok(),
                model.layer.weight().to_plain().ok(),
                "{spec}"
            );
            assert!(values(loaded.forward(x.clone())) == expected, "{spec}");
        }
        let refused = |model, expected: &str| {
            let error = load(model)
                .err()
                .unwrap_or_else(|| panic!("not refused: {expected}"));
            assert!(error.to_string().contains(expected), "{error}");
            error
        };
        let narrow = QuantLinearConfig::new(96, 32, spec)
            .with_bias(bias)
            .with_activations(Some(ActivationDtype::F32))
            .init(device)
            .unwrap_or_else(|error| panic!("{error}"));
        assert!(matches!(
            refused(
                Written {
                    layer: narrow,
                    ..fresh()
                },
                "layer.weight"
            ),
            LoadError::Shape { .. }
        ));
        let adapted = Written {
            layer: fresh().layer.apply_lora(Lora::new(2, 4.0)),
            ..fresh()
        };
        assert!(matches!(
            refused(adapted, "layer.weight"),
            LoadError::Reparameterized { .. }
        ));
        // A float layer in the file cannot be loaded as a quantised weight.
        #[derive(Module, Debug)]
        struct Float {
            first: Linear,
            layer: Linear,
        }
        let (_parent, dir) = folder(&Float {
            first: fresh().first,
            layer: LinearConfig::new(96, 40).with_bias(bias).init(device),
        });
        let error = WeightQuantizer::load(fresh(), &dir, &KeyRemapper::new())
            .err()
            .unwrap_or_else(|| panic!("a float layer was loaded"));
        assert!(
            matches!(&error, LoadError::NotQuantized { path, .. } if path == "layer.weight"),
            "{error}"
        );
    }
}

/// A model whose head has its own weight.
#[derive(Module, Debug)]
struct Headed {
    embedding: Embedding,
    head: Linear,
}

/// A model whose head is the weight of the embedding, which a file holds once.
#[derive(Module, Debug)]
struct Headless {
    embedding: Embedding,
}

fn missing(device: &Device) {
    let headed = || Headed {
        embedding: EmbeddingConfig::new(32, 64).init(device),
        head: LinearConfig::new(64, 32).init(device),
    };
    let saved = Headless {
        embedding: headed().embedding,
    };
    let (_parent, dir) = folder(&saved);
    let error = WeightQuantizer::load(headed(), &dir, &KeyRemapper::new())
        .err()
        .unwrap_or_else(|| panic!("two parameters are missing"));
    assert!(
        matches!(&error, LoadError::Missing { missing, .. } if missing.len() == 2),
        "{error}"
    );
    assert!(
        error.to_string().contains("allow_missing"),
        "the error says what to do: {error}"
    );

    let options = LoadOptions::new(KeyRemapper::new())
        .allow_missing("^head")
        .allow_missing("^tail");
    let model = headed();
    let head = values(model.head.weight.val());
    let (loaded, report) =
        WeightQuantizer::load_with(model, &dir, &options).unwrap_or_else(|error| panic!("{error}"));
    assert!(
        values(loaded.embedding.weight.val()) == values(saved.embedding.weight.val()),
        "what the file has is loaded"
    );
    assert!(
        values(loaded.head.weight.val()) == head,
        "what it has not stays as it is"
    );
    assert_eq!(report.missing, ["head.weight", "head.bias"]);
    assert_eq!(report.unmatched, ["^tail"]);
    assert_eq!(
        *outcome(&report, "head.weight"),
        Outcome::Skipped(SkipReason::NotInCheckpoint)
    );
    assert!(report.to_string().contains("head.bias"), "{report}");

    // A parameter that may be missing is loaded if the file has it. A missing parameter that no
    // pattern allows is an error.
    let all = LoadOptions::new(KeyRemapper::new()).allow_missing("");
    let (_parent, whole) = folder(&loaded);
    let (again, report) = WeightQuantizer::load_with(headed(), &whole, &all)
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(
        report.missing.is_empty() && values(again.head.weight.val()) == head,
        "{report}"
    );
    let bias = LoadOptions::new(KeyRemapper::new()).allow_missing("bias$");
    let error = WeightQuantizer::load_with(headed(), &dir, &bias)
        .err()
        .unwrap_or_else(|| panic!("the weight is missing"));
    assert!(
        matches!(&error, LoadError::Missing { missing, .. } if missing == &["head.weight"]),
        "{error}"
    );
    let error = WeightQuantizer::load_with(headed(), &dir, &bias.allow_missing("("))
        .err()
        .unwrap_or_else(|| panic!("a pattern that is none was taken"));
    assert!(matches!(error, LoadError::Pattern { .. }), "{error}");
}

/// Checks that loaded weights are contiguous in memory, as Burn's own store leaves them.
fn contiguous(device: &Device) {
    let model = fresh(device);
    let (_parent, dir) = folder(&model);
    let (loaded, report) = WeightQuantizer::load(fresh(device), &dir, &KeyRemapper::new())
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((report.quantized(), report.skipped()), (0, 2), "{report}");
    for (found, expected) in [(loaded.up, model.up), (loaded.down, model.down)] {
        assert!(values(found.weight.val()) == values(expected.weight.val()));
        let tensor = found
            .weight
            .val()
            .try_into_primitive::<Flex>()
            .unwrap_or_else(|error| panic!("{error:?}"));
        assert!(tensor.is_contiguous(), "{:?}", tensor.layout());
    }
}
