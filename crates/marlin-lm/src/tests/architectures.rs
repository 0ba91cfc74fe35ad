//! Tests of every architecture: logits against the reference, and files that are saved or
//! quantised.

use marlin_format::checkpoint::{Checkpoint, Dtype};
use marlin_format::{GroupSize, QuantSpec};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::Path;

use super::model::{TOLERANCE, check, full};
use super::reference;
use super::support::*;
use crate::model::{Block, Experts};
use crate::tokens::token_tensor;
use crate::{
    Architecture, LanguageModel, Model, ModelConfig, ModelError, OpenOptions, Projection,
    QuantizeOptions, quantize_folder, save_float,
};
use burn::tensor::{Device, FloatDType};

/// Reads the tensors of a float folder.
fn read_weights(dir: &Path) -> Weights {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let read = |name: &str| {
        let tensor = checkpoint.tensor(name).unwrap();
        let values = tensor.to_f32().unwrap();
        (name.to_string(), (tensor.shape().to_vec(), values))
    };
    checkpoint.names().map(read).collect()
}

#[test]
fn every_architecture_matches_the_reference() {
    for architecture in Architecture::ALL {
        println!("{architecture}");
        check(&config_of(architecture, json!({})), 11);
        check(
            &config_of(
                architecture,
                json!({ "tie_word_embeddings": true, "num_key_value_heads": 3, "num_hidden_layers": 1 }),
            ),
            4,
        );
    }
    check(
        &config_of(Architecture::Qwen3, json!({ "attention_bias": true })),
        7,
    );
}

#[test]
fn sliding_windows_match_the_reference() {
    for window in [1, 3, 10, 11, 12] {
        check(
            &config_of(Architecture::Mistral, json!({ "sliding_window": window })),
            11,
        );
    }
    check(
        &config_of(Architecture::Phi3, json!({ "sliding_window": 4 })),
        9,
    );
    let upper = json!({ "use_sliding_window": true, "sliding_window": 3, "max_window_layers": 2, "num_hidden_layers": 3 });
    let config = config_of(Architecture::Qwen2, upper);
    assert_eq!(
        [0, 1, 2].map(|layer| config.window_of(layer)),
        [None, None, Some(3)]
    );
    check(&config, 10);
}

#[test]
fn a_window_counts_in_the_cache() {
    let mut rng = rng();
    let config = config_of(
        Architecture::Qwen2,
        json!({ "use_sliding_window": true, "sliding_window": 4, "max_window_layers": 1 }),
    );
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    let model = open(&dir).model;
    let (vocab, tokens) = (
        config.vocab_size,
        random_tokens(14, config.vocab_size, &mut rng),
    );
    let expected: Vec<f64> = full(&model, &tokens, 1)
        .into_iter()
        .map(f64::from)
        .collect();
    let mut cache = model.new_cache(1);
    let mut start = 0;
    for seq in [2, 1, 1, 1, 1, 5, 3] {
        let chunk = token_tensor(&tokens[start..start + seq], [1, seq], &model.device());
        let found = model
            .forward(chunk, &mut cache)
            .try_into_vec_as::<f32>()
            .unwrap();
        let error = relative_error(&found, &expected[start * vocab..(start + seq) * vocab]);
        assert!(
            error < TOLERANCE,
            "positions {start}..{}: {error}",
            start + seq
        );
        start += seq;
    }
}

#[test]
fn a_part_of_each_head_is_rotated() {
    for factor in [0.2, 0.4, 0.8] {
        check(
            &config_of(
                Architecture::Phi3,
                json!({ "partial_rotary_factor": factor }),
            ),
            9,
        );
    }
}

/// Returns the config fields of LongRoPE with five frequencies and an original context of
/// `original` positions.
fn long_rope(original: usize) -> serde_json::Value {
    json!({
        "original_max_position_embeddings": original,
        "rope_scaling": { "type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0], "long_factor": [1.0, 2.5, 4.0, 9.0, 30.0] },
    })
}

#[test]
fn long_rope_matches_the_reference() {
    // The model has 96 positions: 3 times and 1 times the original context.
    check(&config_of(Architecture::Phi3, long_rope(32)), 40);
    check(&config_of(Architecture::Phi3, long_rope(96)), 40);
}

#[test]
fn the_factor_of_long_rope_matches_the_reference() {
    for factor in [0.5, 32.0] {
        let mut fields = long_rope(32);
        fields["rope_scaling"]["factor"] = json!(factor);
        check(&config_of(Architecture::Phi3, fields), 40);
    }
}

#[test]
fn yarn_matches_the_reference() {
    // With a base of 10,000 and an original context of 48, the first of five frequencies is kept,
    // and the last two or three are divided by the factor.
    for fields in [
        json!({ "factor": 4.0 }),
        json!({ "factor": 4.0, "beta_fast": 6.5, "beta_slow": 0.01, "truncate": false }),
        json!({ "factor": 40.0, "beta_fast": 3, "beta_slow": 0.5, "mscale": 0.707, "mscale_all_dim": 1.4 }),
        json!({ "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.0 }),
        json!({ "factor": 0.5, "attention_factor": 1.7 }),
        json!({ "factor": 4.0, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": false }),
        json!({ "factor": 4.0, "beta_fast": 0.01, "beta_slow": 9.0, "truncate": false }),
    ] {
        let mut scaling = json!({ "rope_type": "yarn", "original_max_position_embeddings": 48 });
        scaling
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        println!("{scaling}");
        check(
            &config_of(Architecture::Llama, json!({ "rope_scaling": scaling })),
            40,
        );
    }
    let scaling =
        json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24 });
    for architecture in [
        Architecture::Mistral,
        Architecture::Qwen2,
        Architecture::Qwen3,
    ] {
        check(
            &config_of(
                architecture,
                json!({ "rope_theta": 300.0, "rope_scaling": scaling, "partial_rotary_factor": 0.8 }),
            ),
            40,
        );
    }
}

#[test]
fn yarn_takes_its_stretched_context() {
    // Qwen's instructions for YaRN add `rope_scaling` to the config and change nothing else.
    let scaling =
        json!({ "rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 96 });
    let config = config_of(Architecture::Qwen2, json!({ "rope_scaling": scaling }));
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        &config,
        &random_weights(&config, &mut rng()),
        Dtype::F32,
    );
    let with = |max_len| {
        LanguageModel::open(
            &dir,
            &Device::flex(),
            &OpenOptions {
                max_len,
                ..options()
            },
        )
    };
    assert_eq!(with(None).unwrap().model.max_len(), 240);
    assert!(matches!(
        with(Some(241)),
        Err(ModelError::MaxLen {
            asked: 241,
            limit: 240
        })
    ));
    let tokens = random_tokens(240, config.vocab_size, &mut rng());
    assert!(
        full(&with(Some(240)).unwrap().model, &tokens, 1)
            .iter()
            .all(|logit| logit.is_finite())
    );
}

#[test]
fn the_positions_of_a_model_decide_its_long_rope_factors() {
    let mut rng = rng();
    let config = config_of(Architecture::Phi3, long_rope(32));
    let mut by_long = config.clone();
    let Some(crate::RopeScaling::LongRope(scaling)) = &mut by_long.rope_scaling else {
        panic!("{:?}", by_long.rope_scaling)
    };
    scaling.long_factor = scaling.short_factor.clone();
    let weights = random_weights(&config, &mut rng);
    let tokens = random_tokens(20, config.vocab_size, &mut rng);
    let logits = |config: &ModelConfig, max_len| {
        let (_parent, dir) = temporary();
        write_folder(&dir, config, &weights, Dtype::F32);
        full(
            &LanguageModel::open(
                &dir,
                &Device::flex(),
                &OpenOptions {
                    max_len: Some(max_len),
                    ..options()
                },
            )
            .unwrap()
            .model,
            &tokens,
            1,
        )
    };
    let short = logits(&config, 32);
    assert_eq!(short, logits(&by_long, 33));
    assert_ne!(short, logits(&config, 33));
}

#[test]
fn what_is_saved_has_the_architectures_tensors() {
    let mut rng = rng();
    for architecture in Architecture::ALL {
        let config = config_of(
            architecture,
            json!({ "sliding_window": 5, "use_sliding_window": true, "max_window_layers": 1 }),
        );
        let weights = random_weights(&config, &mut rng);
        let ((_a, first), (_b, second)) = (temporary(), temporary());
        write_folder(&first, &config, &weights, Dtype::F32);
        let model = open(&first).model;
        save_float(&model, &config, &second, FloatDType::F32).unwrap();
        let saved = read_weights(&second);
        let is_stacked = saved.keys().any(|name| name.ends_with("experts.down_proj"));
        assert_eq!(is_stacked, architecture == Architecture::GptOss);
        let saved = reference::one_by_one(&saved);
        assert!(saved == weights, "{architecture}");
        let opened = open(&second).model;
        assert_eq!(
            opened.config(),
            &ModelConfig {
                dtype: Some(FloatDType::F32),
                ..config.clone()
            }
        );
        let tokens = random_tokens(8, config.vocab_size, &mut rng);
        assert_eq!(full(&opened, &tokens, 1), full(&model, &tokens, 1));
    }
}

#[test]
fn every_architecture_is_quantised_and_opens() {
    let mut rng = rng();
    for architecture in Architecture::ALL {
        let config = config_of(
            architecture,
            json!({ "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96 }),
        );
        let ((_a, source), (_b, target)) = (temporary(), temporary());
        write_folder(
            &source,
            &config,
            &random_weights(&config, &mut rng),
            Dtype::F16,
        );
        let spec = QuantSpec::int4(GroupSize::G32);
        let report = quantize_folder(&source, &target, &spec, &QuantizeOptions::default(), |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        let of_layer = |layer| match config.experts_of(layer) {
            // Those of attention, of five experts, and of the one beside them.
            Some(experts) => 4 + 3 * 5 + experts.shared_intermediate_size.map_or(0, |_| 3),
            None if architecture == Architecture::Phi3 => 4,
            None => 7,
        };
        let layers = of_layer(0) + of_layer(1);
        assert_eq!(report.quantized.len(), layers, "{architecture}");
        let (float, model) = (open(&source).model, open(&target).model);
        let mixtures = model.layers.iter().filter_map(Block::mixture);
        for mixture in mixtures {
            assert!(matches!(mixture.experts, Experts::Quant(_)));
            assert!(matches!(mixture.router, Projection::Dense(_)));
        }
        let tokens = random_tokens(8, config.vocab_size, &mut rng);
        check_dequantized(&model, &tokens);
        let error = relative_error(&full(&model, &tokens, 1), &full(&float, &tokens, 1));
        assert!(error > 0.01, "{architecture}: {error}");
        if config.experts.is_some() {
            continue;
        }
        let names: Vec<String> = model.projections().map(|(name, _)| name).collect();
        let of_layer = [
            "self_attn.qkv_proj",
            "self_attn.o_proj",
            "mlp.gate_up_proj",
            "mlp.down_proj",
        ];
        let expected: Vec<String> = (0..2)
            .flat_map(|layer| of_layer.map(|name| format!("model.layers.{layer}.{name}")))
            .collect();
        assert_eq!(names[..8], expected);
        assert!(
            model
                .projections()
                .take(8)
                .all(|(_, projection)| matches!(projection, Projection::Quant(_)))
        );
    }
}

#[test]
fn new_models_of_every_architecture_compute_with_their_weights() {
    for architecture in Architecture::ALL {
        let config = config_of(architecture, json!({}));
        let (model, tokens) = (Model::new(&config, &Device::flex()), [1, 2, 3]);
        let (_parent, dir) = temporary();
        save_float(&model, &config, &dir, FloatDType::F32).unwrap();
        let weights = read_weights(&dir);
        let expected = reference::forward(&config, &weights, &tokens).concat();
        let error = relative_error(&full(&model, &tokens, 1), &expected);
        assert!(error < TOLERANCE, "{architecture}: {error}");
    }
}
