//! Tests of models that are split over several devices: Flex, once for each rank.

mod engines;
mod failures;
mod shards;

use std::path::Path;

use burn::tensor::Device;
use marlin_format::checkpoint::Dtype;
use marlin_format::{GroupSize, QuantSpec};
use serde_json::json;

use super::golden::GoldenLogits;
use super::model::{TOLERANCE, full};
use super::stacked::stacked;
use super::support::*;
use crate::{Architecture, LanguageModel, ModelConfig, ModelError, ParallelError, save_float};

/// Opens a folder on `count` ranks of Flex.
fn open_split(dir: &Path, count: usize) -> Result<LanguageModel, ModelError> {
    LanguageModel::open_on(dir, &vec![Device::flex(); count], &options(), |_| {})
}

/// The folders of `tests/golden` that cannot be split over two ranks although their heads can, and
/// words of the reasons: their networks have one group of rows, or the two heads share one.
const NOT_SPLIT: [(&str, &str); 16] = [
    (
        "awq-gemm-g64",
        "`model.layers.0.mlp.down_proj` has 1 groups of 64",
    ),
    (
        "ct-whole-int4-g32-kv-cache",
        "row 16 of `model.layers.0.self_attn.o_proj`",
    ),
    (
        "ct-whole-qwen3-moe",
        "experts.0.down_proj` has 1 groups of 32",
    ),
    (
        "gptq-v1-int4-g64-asym",
        "`model.layers.0.mlp.down_proj` has 1 groups of 64",
    ),
    (
        "gptq-v1-phi3",
        "`model.layers.0.mlp.down_proj` has 1 groups of 32",
    ),
    (
        "gptq-v1-qwen2-bias",
        "`model.layers.0.mlp.down_proj` has 1 groups of 32",
    ),
    (
        "gptq-whole-qwen3-moe",
        "experts.0.down_proj` has 1 groups of 32",
    ),
    (
        "moe-auto-round-gptq-sym",
        "experts.0.down_proj` has 1 groups of 32",
    ),
    ("moe-awq-g32", "experts.0.w2` has 1 groups of 32"),
    ("moe-ct-fp8-block", "down_proj` has 1 groups of 128"),
    (
        "moe-ct-int4-g32-asym",
        "experts.0.down_proj` has 1 groups of 32",
    ),
    (
        "moe-ct-int4-g32-sym",
        "experts.0.down_proj` has 1 groups of 32",
    ),
    ("moe-ct-mxfp4", "experts.0.down_proj` has 1 groups of 32"),
    ("moe-gptq-dynamic", "experts.0.w2` has 1 groups of 32"),
    (
        "moe-gptq-int4-g32-asym-act-order",
        "experts.0.down_proj` has 1 groups of 32",
    ),
    (
        "moe-gptq-int4-g32-sym",
        "experts.0.down_proj` has 1 groups of 32",
    ),
];

/// Opens every golden folder on two ranks, and on more where its heads allow it: tiny models, a
/// few seconds together.
#[test]
fn split_models_have_the_logits_of_transformers() {
    let mut refused = Vec::new();
    let mut split = 0;
    for golden in GoldenLogits::all() {
        let heads = golden.config.num_attention_heads;
        for count in 2..=4 {
            let devices = vec![Device::flex(); count];
            let opened = LanguageModel::open_on(&golden.dir, &devices, &golden.options(), |_| {});
            match opened {
                Ok(opened) => {
                    assert!(heads.is_multiple_of(count), "{}", golden.name);
                    assert_eq!(opened.model.rank_count(), count);
                    golden.check(&opened.model);
                    split += 1;
                }
                Err(ModelError::Parallel(ParallelError::Heads { .. })) => {
                    assert!(!heads.is_multiple_of(count), "{}", golden.name);
                }
                Err(ModelError::Parallel(error)) if count == 2 => {
                    refused.push((golden.name.clone(), error.to_string()));
                }
                Err(ModelError::Parallel(ParallelError::Groups { .. })) => {}
                Err(error) => panic!("{}: {error}", golden.name),
            }
        }
    }
    println!("{split} models were split");
    let names: Vec<&str> = refused.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, NOT_SPLIT.map(|(name, _)| name), "{refused:?}");
    for ((name, reason), (_, words)) in refused.iter().zip(NOT_SPLIT) {
        assert!(reason.contains(words), "{name}: {reason}");
    }
    assert!(split > 40, "{split}");
}

/// Checks that a folder has the same logits on one device and on each number of ranks.
fn check_split(what: &str, dir: &Path, config: &ModelConfig, counts: &[usize]) {
    let mut rng = rng();
    let whole = open(dir).model;
    let tokens = random_tokens(2 * 9, config.vocab_size, &mut rng);
    let expected: Vec<f64> = full(&whole, &tokens, 2)
        .into_iter()
        .map(f64::from)
        .collect();
    for &count in counts {
        let split =
            open_split(dir, count).unwrap_or_else(|error| panic!("{what}, {count}: {error}"));
        let error = relative_error(&full(&split.model, &tokens, 2), &expected);
        println!("{what}, {count} ranks: relative error {error:.1e}");
        assert!(error < TOLERANCE, "{what}, {count} ranks: {error}");
    }
}

#[test]
fn random_models_of_every_architecture_are_split() {
    let mut rng = rng();
    let biases = json!({ "attention_bias": true, "mlp_bias": true });
    let mut configs = vec![
        // Six ranks repeat two key and value heads, or three.
        (config(), vec![2, 6]),
        (config_with(json!({ "num_key_value_heads": 3 })), vec![3, 6]),
        (config_with(json!({ "num_key_value_heads": 1 })), vec![2, 3]),
        (config_with(biases), vec![2]),
        (
            config_with(json!({ "tie_word_embeddings": true })),
            vec![2, 6],
        ),
    ];
    for architecture in Architecture::ALL {
        configs.push((config_of(architecture, json!({})), vec![2]));
        let tied = json!({ "tie_word_embeddings": true, "num_key_value_heads": 6 });
        configs.push((config_of(architecture, tied), vec![3]));
    }
    for (config, counts) in configs {
        let weights = random_weights(&config, &mut rng);
        let (_parent, dir) = temporary();
        write_folder(&dir, &config, &weights, Dtype::F32);
        check_split(&config.architecture.to_string(), &dir, &config, &counts);
        if config.experts.is_some() {
            let (_parent, dir) = temporary();
            write_folder(&dir, &config, &stacked(&config, &weights), Dtype::F32);
            check_split(
                &format!("{} in stacks", config.architecture),
                &dir,
                &config,
                &counts,
            );
        }
    }
}

#[test]
fn quantised_models_are_split_in_whole_groups() {
    let mut rng = rng();
    // Seven groups of 32 rows, the last one incomplete.
    let sizes = json!({
        "hidden_size": 64, "intermediate_size": 212, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "moe_intermediate_size": 84, "shared_expert_intermediate_size": 96,
    });
    for (spec, counts) in [
        (QuantSpec::int4(GroupSize::G32), vec![2, 4]),
        (QuantSpec::int4(GroupSize::G64).with_zero_points(), vec![2]),
        (QuantSpec::int8(GroupSize::Channel), vec![2, 4]),
        (QuantSpec::fp8(), vec![4]),
        (QuantSpec::mxfp4(), vec![2]),
        (QuantSpec::nvfp4(), vec![2]),
    ] {
        for architecture in [Architecture::Llama, Architecture::Phi3, Architecture::Qwen2] {
            let config = config_of(architecture, sizes.clone());
            let (_parent, dir) = temporary();
            let weights = random_weights(&config, &mut rng);
            let is_projection = |layer: &str| layer.ends_with("_proj");
            write_quantized(&dir, &config, &weights, |layer| {
                is_projection(layer).then_some(spec)
            });
            check_split(&format!("{architecture} {spec}"), &dir, &config, &counts);
        }
    }
    for spec in [QuantSpec::int4(GroupSize::G32), QuantSpec::mxfp4()] {
        for architecture in [Architecture::Qwen2Moe, Architecture::Qwen3Moe] {
            let config = config_of(architecture, sizes.clone());
            let (_parent, dir) = temporary();
            let weights = random_weights(&config, &mut rng);
            write_quantized(&dir, &config, &weights, |layer| {
                layer.ends_with("_proj").then_some(spec)
            });
            check_split(&format!("{architecture} {spec}"), &dir, &config, &[2]);
        }
    }
}

#[test]
fn a_rounded_head_is_rounded_on_every_rank() {
    let mut rng = rng();
    let config = config_with(json!({ "tie_word_embeddings": true }));
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    let tokens = random_tokens(9, config.vocab_size, &mut rng);
    let spec = QuantSpec::int8(GroupSize::G32);
    let with_head = crate::OpenOptions {
        head: Some(spec),
        ..options()
    };
    let whole = LanguageModel::open(&dir, &Device::flex(), &with_head).unwrap();
    let expected: Vec<f64> = full(&whole.model, &tokens, 1)
        .into_iter()
        .map(f64::from)
        .collect();
    let devices = [Device::flex(), Device::flex()];
    let split = LanguageModel::open_on(&dir, &devices, &with_head, |_| {}).unwrap();
    let mut later = std::sync::Arc::unwrap_or_clone(open_split(&dir, 2).unwrap().model);
    later.quantize_head(&spec).unwrap();
    for model in [&*split.model, &later] {
        let error = relative_error(&full(model, &tokens, 1), &expected);
        assert!(error < TOLERANCE, "{error}");
    }
    // Weights in floats have the same values.
    later.dequantize();
    let error = relative_error(&full(&later, &tokens, 1), &expected);
    assert!(error < TOLERANCE, "{error}");
}

#[test]
fn a_split_model_is_not_saved() {
    let config = config();
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        &config,
        &random_weights(&config, &mut rng()),
        Dtype::F32,
    );
    let split = open_split(&dir, 2).unwrap().model;
    let (_parent, target) = temporary();
    let error = save_float(&split, &config, &target, burn::tensor::FloatDType::F32);
    assert!(
        matches!(
            error,
            Err(ModelError::Parallel(ParallelError::NotWhole { count: 2 }))
        ),
        "{error:?}"
    );
    assert!(!target.exists());
}

#[test]
fn random_weights_are_split() {
    let config = config_of(Architecture::Qwen2Moe, json!({}));
    let devices = vec![Device::flex(); 2];
    let dtype = burn::tensor::FloatDType::F32;
    let random = |devices: &[Device]| crate::Model::random_on(&config, 96, dtype, None, devices);
    let tokens = random_tokens(12, config.vocab_size, &mut rng());
    let model = random(&devices).unwrap();
    assert_eq!(model.rank_count(), 2);
    let logits = full(&model, &tokens, 1);
    assert!(logits.len() == 12 * config.vocab_size && logits.iter().all(|value| value.is_finite()));
    assert_eq!(random(&devices[..1]).unwrap().rank_count(), 1);
    assert!(matches!(
        random(&[]),
        Err(ModelError::Parallel(ParallelError::NoDevices))
    ));
}
