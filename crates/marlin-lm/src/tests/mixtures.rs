//! Mixtures of experts in files that do not fit, and in files of which some experts are quantised.

use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::Device;
use marlin_format::checkpoint::Dtype;
use marlin_format::checkpoint::compressed_tensors::LayerPattern;
use marlin_format::{GroupSize, QuantSpec};
use serde_json::json;

use super::support::*;
use crate::{
    Architecture, LanguageModel, ModelConfig, ModelConfigError, ModelError, QuantizeOptions,
    check_folder, quantize_folder,
};

fn mixture(architecture: Architecture) -> ModelConfig {
    config_of(architecture, json!({ "hidden_size": 64, "head_dim": 16 }))
}

/// Returns the messages of the error of a folder that must be refused, and of its causes.
fn refusal(dir: &Path) -> String {
    let error = LanguageModel::open(dir, &Device::flex(), &options()).expect_err("must be refused");
    let faults = check_folder(dir, &Device::flex(), &options(), |_, _, _| {});
    assert!(!faults.is_empty(), "the check finds nothing: {error}");
    std::iter::successors(Some(&error as &dyn std::error::Error), |error| {
        error.source()
    })
    .map(ToString::to_string)
    .collect::<Vec<_>>()
    .join(": ")
}

#[test]
fn an_expert_that_is_missing_or_of_another_shape_is_named() {
    let config = mixture(Architecture::Qwen3Moe);
    let name = "model.layers.0.mlp.experts.3.up_proj.weight";
    let written = |change: &dyn Fn(&mut Weights)| {
        let mut weights = random_weights(&config, &mut rng());
        change(&mut weights);
        let (parent, dir) = temporary();
        write_folder(&dir, &config, &weights, Dtype::F32);
        (parent, refusal(&dir))
    };
    let (_a, missing) = written(&|weights| drop(weights.remove(name)));
    assert!(missing.contains(name), "{missing}");
    let (_b, shape) = written(&|weights| {
        let (shape, values) = weights.get_mut(name).unwrap();
        shape[0] -= 1;
        values.truncate(shape[0] * shape[1]);
    });
    assert!(
        shape.contains(name) && shape.contains("[31, 64]") && shape.contains("[32, 64]"),
        "{shape}"
    );
}

#[test]
fn another_number_of_experts_than_the_configs_is_refused() {
    let config = mixture(Architecture::Mixtral);
    let weights = random_weights(&config, &mut rng());
    for (count, expected) in [(4, "[4, 64]"), (6, "[6, 64]")] {
        let mut other = config.clone();
        if let Some(experts) = &mut other.experts {
            experts.count = count;
        }
        let (_parent, dir) = temporary();
        write_folder(&dir, &other, &weights, Dtype::F32);
        let message = refusal(&dir);
        assert!(
            message.contains("block_sparse_moe.gate.weight") && message.contains(expected),
            "{message}"
        );
    }
    // Without experts beyond the router's, the surplus ones are named.
    let mut fewer = config.clone();
    if let Some(experts) = &mut fewer.experts {
        experts.count = 4;
    }
    let mut weights = weights;
    for layer in 0..config.num_hidden_layers {
        let router = format!("model.layers.{layer}.block_sparse_moe.gate.weight");
        let (shape, values) = weights.get_mut(&router).unwrap();
        shape[0] = 4;
        values.truncate(4 * 64);
    }
    let (_parent, dir) = temporary();
    write_folder(&dir, &fewer, &weights, Dtype::F32);
    let message = refusal(&dir);
    assert!(
        message.contains("model.layers.0.block_sparse_moe.experts.4."),
        "{message}"
    );
}

#[test]
fn configs_whose_numbers_of_experts_do_not_fit_are_refused() {
    let of = |fields: serde_json::Value| {
        let mut json = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 71, "hidden_size": 36, "intermediate_size": 52,
            "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 6, "num_key_value_heads": 2,
        });
        json.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        ModelConfig::from_json(&json.to_string())
    };
    for fields in [
        json!({ "num_experts": 4, "num_experts_per_tok": 5 }),
        json!({ "num_experts": 64, "num_experts_per_tok": 33 }),
        json!({ "num_experts": 2000, "num_experts_per_tok": 2 }),
    ] {
        assert!(
            matches!(of(fields.clone()), Err(ModelConfigError::Experts(_))),
            "{fields}"
        );
    }
    for (fields, name) in [
        (json!({ "num_experts_per_tok": 0 }), "num_experts_per_tok"),
        (
            json!({ "moe_intermediate_size": 0 }),
            "moe_intermediate_size",
        ),
        (json!({ "decoder_sparse_step": 0 }), "decoder_sparse_step"),
    ] {
        let error = of(fields).unwrap_err();
        assert!(
            matches!(error, ModelConfigError::Size { field, found: 0 } if field == name),
            "{error}"
        );
    }
    let mut qwen2 = mixture(Architecture::Qwen2Moe).to_json();
    qwen2["qkv_bias"] = json!(false);
    let error = ModelConfig::from_json(&qwen2.to_string()).unwrap_err();
    assert!(error.to_string().contains("`qkv_bias` is false"), "{error}");
    // Without experts, all layers are dense; defaults are those of the class.
    assert_eq!(of(json!({ "num_experts": 0 })).unwrap().experts, None);
    let default = of(json!({})).unwrap();
    let experts = default.experts.as_ref().unwrap();
    assert_eq!((experts.count, experts.top_k), (128, 8));
    let again = ModelConfig::from_json(&default.to_json().to_string()).unwrap();
    assert_eq!(again, default);
}

const SPEC: QuantSpec = QuantSpec::int4(GroupSize::G32);

/// Quantises a folder with [`SPEC`] and these options.
fn quantized(source: &Path, target: &Path, options: &QuantizeOptions) -> Result<(), ModelError> {
    let report = quantize_folder(
        source,
        target,
        &SPEC,
        options,
        |_| ControlFlow::Continue(()),
    );
    report.map(drop)
}

/// Experts of which some are float, or whose gate and up have different formats, have no kernel:
/// such files are not opened, and not written.
#[test]
fn experts_of_different_formats_are_refused_by_name() {
    let config = mixture(Architecture::Qwen2Moe);
    let weights = random_weights(&config, &mut rng());
    let (_parent, source) = temporary();
    write_folder(&source, &config, &weights, Dtype::F32);
    for (excluded, opened) in [
        (
            r"model\.layers\.1\.mlp\.experts\.2\.",
            "model.layers.1.mlp.experts.2.gate_proj",
        ),
        (
            r".*\.experts\.1\.up_proj",
            "model.layers.0.mlp.experts.1.gate_proj",
        ),
        (r".*\.experts\.\d\.down_proj", "model.layers.0.mlp.experts"),
    ] {
        let pattern = LayerPattern::new(format!("re:{excluded}")).unwrap();
        let (_other, target) = temporary();
        write_quantized(&target, &config, &weights, |layer| {
            (layer.contains(".experts.") && !pattern.matches(layer)).then_some(SPEC)
        });
        let error = LanguageModel::open(&target, &Device::flex(), &options());
        let faults = check_folder(&target, &Device::flex(), &options(), |_, _, _| {});
        assert!(!faults.is_empty(), "{excluded}: the check finds nothing");
        match error.map(drop) {
            Err(ModelError::MixedExperts { layer } | ModelError::NotJoined { layer }) => {
                assert_eq!(layer, opened, "{excluded}");
            }
            other => panic!("{excluded}: {other:?}"),
        }

        let options = QuantizeOptions {
            exclude: vec![format!("re:{excluded}")],
            ..QuantizeOptions::default()
        };
        let (_another, target) = temporary();
        let error = quantized(&source, &target, &options);
        let Err(ModelError::MixedExperts { layer }) = &error else {
            panic!("{excluded}: {error:?}")
        };
        assert!(layer.contains(".mlp.experts."), "{excluded}: {layer}");
        assert!(!target.exists(), "{excluded}");
    }
}

#[test]
fn an_expert_of_another_format_is_refused_by_name() {
    let config = mixture(Architecture::Mixtral);
    let weights = random_weights(&config, &mut rng());
    let ((_parent, source), (_other, target)) = (temporary(), temporary());
    write_folder(&source, &config, &weights, Dtype::F32);
    let other = "model.layers.1.block_sparse_moe.experts.3.w2";
    write_quantized(&target, &config, &weights, |layer| {
        let spec = match layer == other {
            true => QuantSpec::int8(GroupSize::G32),
            false => SPEC,
        };
        layer.contains(".experts.").then_some(spec)
    });
    let message = refusal(&target);
    for part in [other, "int8", "int4"] {
        assert!(message.contains(part), "{message}");
    }

    // Gates and ups are one matmul, downs are another.
    let options = |pattern: &str| QuantizeOptions {
        overrides: vec![(pattern.into(), "bits:8".parse().unwrap())],
        ..QuantizeOptions::default()
    };
    for pattern in [other, r"re:.*layers\.0\..*experts\.\d\.w1"] {
        let (_another, target) = temporary();
        let error = quantized(&source, &target, &options(pattern));
        let Err(ModelError::OtherExpert {
            expected, found, ..
        }) = &error
        else {
            panic!("{pattern}: {error:?}")
        };
        assert_ne!(expected, found, "{pattern}");
        assert!(!target.exists(), "{pattern}");
    }
    let (_another, target) = temporary();
    quantized(&source, &target, &options("re:.*w2")).unwrap();
    let faults = check_folder(
        &target,
        &Device::flex(),
        &super::support::options(),
        |_, _, _| {},
    );
    assert!(faults.is_empty(), "{faults:?}");
}
