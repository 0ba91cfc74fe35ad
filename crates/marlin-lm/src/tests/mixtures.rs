//! Mixtures of experts in files that do not fit, and in files of which some experts are quantised.

use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::Device;
use marlin_format::checkpoint::Dtype;
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

/// Experts of which some are float, or whose gate and up have different formats, have no kernel.
#[test]
fn experts_of_different_formats_are_refused_by_name() {
    let config = mixture(Architecture::Qwen2Moe);
    let spec = QuantSpec::int4(GroupSize::G32);
    let (_parent, source) = temporary();
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng()),
        Dtype::F32,
    );
    for (exclude, named) in [
        (
            r"re:model\.layers\.1\.mlp\.experts\.2\.",
            "model.layers.1.mlp.experts.2.gate_proj",
        ),
        (
            r"re:.*\.experts\.1\.up_proj",
            "model.layers.0.mlp.experts.1.gate_proj",
        ),
        (
            r"re:.*\.experts\.\d\.down_proj",
            "model.layers.0.mlp.experts",
        ),
    ] {
        let (_other, target) = temporary();
        let options = QuantizeOptions {
            exclude: vec![exclude.into()],
            ..QuantizeOptions::default()
        };
        quantize_folder(&source, &target, &spec, &options, |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        let error = LanguageModel::open(&target, &Device::flex(), &super::support::options());
        let faults = check_folder(
            &target,
            &Device::flex(),
            &super::support::options(),
            |_, _, _| {},
        );
        assert!(!faults.is_empty(), "{exclude}: the check finds nothing");
        match error.map(drop) {
            Err(ModelError::MixedExperts { layer } | ModelError::NotJoined { layer }) => {
                assert_eq!(layer, named, "{exclude}");
            }
            other => panic!("{exclude}: {other:?}"),
        }
    }
}

#[test]
fn an_expert_of_another_format_is_refused_by_name() {
    let config = mixture(Architecture::Mixtral);
    let (_parent, source) = temporary();
    write_folder(
        &source,
        &config,
        &random_weights(&config, &mut rng()),
        Dtype::F32,
    );
    let (_other, target) = temporary();
    let options = QuantizeOptions {
        overrides: vec![(
            r"re:.*layers\.1\..*experts\.3\.w2".into(),
            "bits:8".parse().unwrap(),
        )],
        ..QuantizeOptions::default()
    };
    let spec = QuantSpec::int4(GroupSize::G32);
    quantize_folder(&source, &target, &spec, &options, |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    let message = refusal(&target);
    for part in [
        "model.layers.1.block_sparse_moe.experts.3.w2",
        "int8",
        "int4",
    ] {
        assert!(message.contains(part), "{message}");
    }
}
