//! Tests of the model: logits against the reference, passes with a KV cache against a full pass,
//! and training.

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, FloatDType, Gradients, Tensor};
use burn_marlin::{GroupSize, QuantSpec, WeightQuantizer};
use marlin_format::checkpoint::Dtype;
use rand::RngExt;
use serde_json::json;

use super::reference;
use super::support::*;
use crate::model::Residual;
use crate::tokens::token_tensor;
use crate::{Architecture, LanguageModel, Model, ModelConfig, OpenOptions};

/// The largest relative error of a whole model in f32. A single wrong rotary pair or head gives an
/// error above 0.01.
pub(super) const TOLERANCE: f64 = 1e-5;

pub(super) fn full(model: &Model, tokens: &[u32], batch: usize) -> Vec<f32> {
    let tokens = token_tensor(tokens, [batch, tokens.len() / batch], &model.device());
    model.forward_full(tokens).try_into_vec_as::<f32>().unwrap()
}

/// Checks the logits of a random model of this config, opened from a folder, against the reference.
pub(super) fn check(config: &ModelConfig, seq: usize) {
    let mut rng = rng();
    let weights = random_weights(config, &mut rng);
    let (_parent, dir) = temporary();
    write_folder(&dir, config, &weights, Dtype::F32);
    let model = open(&dir).model;
    let tokens = random_tokens(2 * seq, config.vocab_size, &mut rng);
    let expected: Vec<f64> = tokens
        .chunks(seq)
        .flat_map(|tokens| reference::forward(config, &weights, tokens))
        .flatten()
        .collect();
    let error = relative_error(&full(&model, &tokens, 2), &expected);
    println!("relative error {error:.1e}");
    assert!(error < TOLERANCE, "{config:?}: {error}");
}

#[test]
fn grouped_query_attention_matches_the_reference() {
    check(&config(), 11);
    check(&config_with(json!({ "num_key_value_heads": 6 })), 5);
    check(&config_with(json!({ "num_key_value_heads": 1 })), 8);
    check(&config(), 1);
}

#[test]
fn tied_heads_and_biases_match_the_reference() {
    check(&config_with(json!({ "tie_word_embeddings": true })), 7);
    check(
        &config_with(json!({ "attention_bias": true, "mlp_bias": true })),
        7,
    );
}

#[test]
fn a_head_size_of_its_own_matches_the_reference() {
    check(
        &config_with(json!({ "head_dim": 10, "rope_theta": 500000.0 })),
        9,
    );
}

#[test]
fn llama3_rotary_scaling_matches_the_reference() {
    // The 6 frequencies have wavelengths of 6 to 40000 positions: some frequencies are kept, some
    // interpolated and some divided.
    let scaling = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 400 });
    let config =
        config_with(json!({ "head_dim": 12, "rope_scaling": scaling, "rope_theta": 500000.0 }));
    check(&config, 60);
}

#[test]
fn random_shapes_match_the_reference() {
    let mut rng = rng();
    for _ in 0..4 {
        let kv_heads = rng.random_range(1..4usize);
        let config = config_with(json!({
            "vocab_size": rng.random_range(3..90), "hidden_size": rng.random_range(5..50), "intermediate_size": rng.random_range(1..70),
            "num_hidden_layers": rng.random_range(1..4), "num_key_value_heads": kv_heads,
            "num_attention_heads": kv_heads * rng.random_range(1..4usize), "head_dim": 2 * rng.random_range(1..9usize),
            "tie_word_embeddings": rng.random::<bool>(), "rms_norm_eps": 1e-6,
        }));
        check(&config, rng.random_range(1..20));
    }
}

#[test]
fn prefill_and_decode_with_a_cache_equal_the_full_pass() {
    let mut rng = rng();
    let config = config();
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    let model = open(&dir).model;
    let (vocab, device) = (config.vocab_size, model.device());
    let tokens = random_tokens(20, vocab, &mut rng);
    let expected: Vec<f64> = full(&model, &tokens, 1)
        .into_iter()
        .map(f64::from)
        .collect();

    let mut cache = model.new_cache(1);
    assert!(cache.is_empty());
    // In the second round the memory of the KV cache still has the keys of the first round, which
    // must have no effect.
    for chunks in [vec![7, 1, 1, 5, 6], vec![1, 1, 18]] {
        cache.clear();
        let mut start = 0;
        for seq in chunks {
            let chunk = token_tensor(&tokens[start..start + seq], [1, seq], &device);
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
            assert_eq!(cache.len(), start);
        }
    }

    cache.clear();
    let last = model.forward_last(token_tensor(&tokens, [1, 20], &device), &mut cache);
    assert_eq!(last.dims(), [1, vocab]);
    assert!(
        relative_error(
            &last.try_into_vec_as::<f32>().unwrap(),
            &expected[19 * vocab..]
        ) < TOLERANCE
    );
}

#[test]
fn layers_one_by_one_equal_the_full_pass() {
    let upper = json!({ "use_sliding_window": true, "sliding_window": 3, "max_window_layers": 2, "num_hidden_layers": 3 });
    let configs = [
        config(),
        config_of(Architecture::Mistral, json!({ "sliding_window": 5 })),
        config_of(Architecture::Qwen2, upper),
        config_of(Architecture::Qwen3, json!({})),
        config_of(Architecture::Phi3, json!({ "partial_rotary_factor": 0.6 })),
    ];
    for config in configs {
        let mut rng = rng();
        let (_parent, dir) = temporary();
        write_folder(
            &dir,
            &config,
            &random_weights(&config, &mut rng),
            Dtype::F32,
        );
        let model = open(&dir).model;
        let tokens = random_tokens(2 * 11, config.vocab_size, &mut rng);
        let expected: Vec<f64> = full(&model, &tokens, 2)
            .into_iter()
            .map(f64::from)
            .collect();
        let mut hidden = model.embed(token_tensor(&tokens, [2, 11], &model.device()));
        for layer in &model.layers {
            hidden = layer.forward_full(hidden, model.rope());
            assert_eq!(hidden.dims(), [2, 11, config.hidden_size]);
        }
        let found = model
            .head(model.norm.forward(hidden))
            .try_into_vec_as::<f32>()
            .unwrap();
        let error = relative_error(&found, &expected);
        assert!(error < 1e-6, "{}: {error}", config.architecture);
    }
}

#[test]
fn the_residual_stream_is_the_sum_of_what_was_added() {
    let device = Device::flex();
    let model = Model::new(&config(), &device);
    let values = || Tensor::<2>::random([3, 36], burn::tensor::Distribution::Default, &device);
    let [hidden, first, second] = [values(), values(), values()];
    let expected = hidden.clone() + first.clone() + second.clone();
    let stream = || {
        Residual::new(hidden.clone())
            .plus(first.clone())
            .plus(second.clone())
    };
    let vec = |x: Tensor<2>| x.try_into_vec_as::<f32>().unwrap();
    assert_eq!(vec(stream().into_tensor()), vec(expected.clone()));
    let normalised = vec(model.norm.forward(expected.clone()));
    assert_eq!(vec(stream().norm(&model.norm)), normalised);
    let projections = &model.layers[0].attention().qkv_proj;
    let (found, after) = stream().project(&model.norm, projections);
    assert_eq!(
        vec(found),
        vec(projections.forward_joined(model.norm.forward(expected.clone())))
    );
    assert_eq!(vec(after.into_tensor()), vec(expected));
}

#[test]
fn a_cache_holds_a_batch() {
    let mut rng = rng();
    let model = Model::new(&config(), &Device::flex());
    let tokens = random_tokens(3 * 8, 71, &mut rng);
    let expected: Vec<f64> = full(&model, &tokens, 3)
        .into_iter()
        .map(f64::from)
        .collect();
    let mut cache = model.new_cache(3);
    let tokens = token_tensor(&tokens, [3, 8], &model.device());
    model.forward(tokens.clone().slice([0..3, 0..7]), &mut cache);
    let found = model
        .forward_last(tokens.slice([0..3, 7..8]), &mut cache)
        .try_into_vec_as::<f32>()
        .unwrap();
    let expected: Vec<f64> = expected
        .chunks(71)
        .skip(7)
        .step_by(8)
        .flatten()
        .copied()
        .collect();
    assert!(relative_error(&found, &expected) < TOLERANCE);
}

#[test]
fn half_precision_stays_close() {
    let mut rng = rng();
    let config = config();
    let weights = random_weights(&config, &mut rng);
    for (file, dtype, tolerance) in [
        (Dtype::F16, FloatDType::F16, 0.01),
        (Dtype::BF16, FloatDType::BF16, 0.06),
    ] {
        let (_parent, dir) = temporary();
        write_folder(&dir, &config, &weights, file);
        let llama = LanguageModel::open(
            &dir,
            &Device::flex(),
            &OpenOptions {
                dtype: None,
                ..options()
            },
        )
        .unwrap();
        assert_eq!(llama.model.dtype(), dtype);
        let tokens = random_tokens(9, config.vocab_size, &mut rng);
        let expected: Vec<f64> = reference::forward(&config, &weights, &tokens)
            .into_iter()
            .flatten()
            .collect();
        let error = relative_error(&full(&llama.model, &tokens, 1), &expected);
        println!("{dtype:?}: relative error {error:.1e}");
        assert!(error < tolerance, "{dtype:?}: {error}");
        let mut cache = llama.model.new_cache(1);
        let last = llama
            .model
            .forward_last(token_tensor(&tokens, [1, 9], &Device::flex()), &mut cache)
            .try_into_vec_as::<f32>()
            .unwrap();
        assert!(relative_error(&last, &expected[8 * config.vocab_size..]) < 2.0 * tolerance);
    }
}

#[test]
fn every_parameter_gets_a_gradient() {
    struct Count<'a>(&'a Gradients, usize);
    impl ModuleVisitor for Count<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = param
                .val()
                .grad(self.0)
                .expect("a gradient")
                .try_into_vec_as::<f32>()
                .unwrap();
            assert!(gradient.iter().all(|value| value.is_finite()));
            assert!(gradient.iter().any(|&value| value != 0.0));
            self.1 += 1;
        }
    }
    let mut rng = rng();
    let config = config_with(json!({ "attention_bias": true }));
    let model = Model::new(&config, &Device::flex().autodiff());
    let tokens = token_tensor(&random_tokens(14, 71, &mut rng), [2, 7], &model.device());
    let logits = model.forward_full(tokens.clone());
    let weights = Tensor::<3>::random(
        [2, 7, 71],
        burn::tensor::Distribution::Default,
        &model.device(),
    );
    let gradients = (logits.clone() * weights).sum().backward();
    let mut count = Count(&gradients, 0);
    model.visit(&mut count);
    // Embedding, lm_head and norm; in each layer two norms, four projections and two biases. q, k
    // and v are one projection, and so are gate and up.
    assert_eq!(count.1, 3 + 2 * 8);

    // The model for inference has no autodiff, not even in its rotary tables.
    let valid = model.valid();
    let expected: Vec<f64> = logits
        .try_into_vec_as::<f32>()
        .unwrap()
        .into_iter()
        .map(f64::from)
        .collect();
    let found = valid.forward_full(token_tensor(&[0, 1], [1, 2], &Device::flex()));
    assert!(!found.is_autodiff());
    let found = valid
        .forward_full(tokens.without_autodiff())
        .try_into_vec_as::<f32>()
        .unwrap();
    assert!(relative_error(&found, &expected) < TOLERANCE);
}

#[test]
fn new_models_have_the_distribution_they_promise() {
    let config = config_with(json!({ "hidden_size": 128, "head_dim": 32, "vocab_size": 500 }));
    let model = Model::new(&config, &Device::flex());
    let values = model
        .embed_tokens
        .weight
        .val()
        .try_into_vec_as::<f32>()
        .unwrap();
    let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / values.len() as f64;
    let deviation = (values
        .iter()
        .map(|&x| (f64::from(x) - mean).powi(2))
        .sum::<f64>()
        / values.len() as f64)
        .sqrt();
    assert!(
        mean.abs() < 0.001 && (deviation - 0.02).abs() < 0.001,
        "mean {mean}, deviation {deviation}"
    );
    assert_eq!(model.max_len(), 96);
    assert_eq!(
        model.num_params(),
        2 * 500 * 128 + 128 + 2 * (2 * 128 + 2 * 128 * 192 + 2 * 128 * 64 + 3 * 128 * 52)
    );
}

#[test]
fn one_call_converts_a_dense_model() {
    let config = config_with(
        json!({ "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "intermediate_size": 96 }),
    );
    let mut rng = rng();
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    let model = open(&dir).model;
    let tokens = random_tokens(12, 71, &mut rng);
    let float: Vec<f64> = full(&model, &tokens, 1)
        .into_iter()
        .map(f64::from)
        .collect();
    let (model, report) = WeightQuantizer::new(QuantSpec::int4(GroupSize::G32))
        .exclude("lm_head")
        .quantize(Arc::unwrap_or_clone(model))
        .unwrap();
    assert_eq!(report.quantized(), 8, "{report}");
    check_dequantized(&model, &tokens);
    let error = relative_error(&full(&model, &tokens, 1), &float);
    assert!(error > 0.01, "{error}");
}
