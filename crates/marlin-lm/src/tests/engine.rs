//! Tests of the `Engine` on random models.

mod batch;
mod sequences;

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::Device;
use marlin_format::checkpoint::Dtype;
use marlin_format::{GroupSize, QuantSpec};
use serde_json::json;

use super::support::*;
use crate::tokens::token_tensor;
use crate::{
    Architecture, Engine, LanguageModel, Model, ModelConfig, ModelError, OpenOptions, Projection,
    RequestParams, Sampling, SamplingError, StepOutput, StopReason, Suppression,
};

const GREEDY: RequestParams = RequestParams::GREEDY;

fn model(config: &ModelConfig) -> Arc<Model> {
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        config,
        &random_weights(config, &mut rng()),
        Dtype::F32,
    );
    open(&dir).model
}

/// Decodes a prompt in an engine without other requests. Returns the new tokens and the stop
/// reason.
fn alone(
    model: &Arc<Model>,
    prompt: &[u32],
    options: &RequestParams,
) -> (Vec<u32>, Option<Result<StopReason, SamplingError>>) {
    let mut engine = Engine::new(model.clone(), 1).unwrap();
    let slot = engine.add_request(prompt, options).unwrap();
    let mut tokens = Vec::new();
    loop {
        let decoded = engine.step().unwrap();
        let [
            StepOutput {
                slot: found,
                token,
                end,
            },
        ] = &decoded[..]
        else {
            panic!("{decoded:?}")
        };
        assert_eq!(*found, slot);
        tokens.extend(token);
        if end.is_some() {
            assert_eq!(engine.sequences(), 0);
            return (tokens, end.clone());
        }
    }
}

/// Returns the logits after `tokens`, computed without a cache.
fn last_logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let input = token_tensor(tokens, [1, tokens.len()], &Device::flex());
    let logits = model.forward_full(input).into_data();
    let logits = logits.try_into_vec::<f32>().unwrap();
    logits[(tokens.len() - 1) * model.config().vocab_size..].to_vec()
}

#[test]
fn penalties_and_biases_are_added_to_logits() {
    let mut rng = rng();
    let model = model(&config());
    let vocab = model.config().vocab_size;
    let prompt = random_tokens(6, vocab, &mut rng);
    let params = RequestParams {
        sampling: Sampling {
            presence_penalty: 0.3,
            frequency_penalty: 0.45,
            ..Sampling::GREEDY
        },
        logit_bias: BTreeMap::from([(7, 0.5), (11, -100.0)]),
        max_new_tokens: 24,
        ..GREEDY
    };
    let mut expected = prompt.clone();
    for _ in 0..params.max_new_tokens {
        let mut logits = last_logits(&model, &expected);
        for (token, logit) in (0..).zip(&mut logits) {
            let generated = &expected[prompt.len()..];
            let count = generated.iter().filter(|&&found| found == token).count();
            *logit += params.logit_bias.get(&token).unwrap_or(&0.0) - 0.45 * count as f32;
            *logit -= if count > 0 { 0.3 } else { 0.0 };
        }
        let best = (0..).zip(logits).max_by(|(_, a), (_, b)| a.total_cmp(b));
        expected.extend(best.map(|(token, _)| token));
    }
    let (found, _) = alone(&model, &prompt, &params);
    assert_eq!(found, expected[prompt.len()..]);
    let (free, _) = alone(
        &model,
        &prompt,
        &RequestParams {
            max_new_tokens: 24,
            ..GREEDY
        },
    );
    assert_ne!(found, free);
    assert!(!found.contains(&11));
}

#[test]
fn logit_biases_outside_their_range_are_refused() {
    let model = model(&config());
    let vocab_size = model.config().vocab_size;
    let mut engine = Engine::new(model, 1).unwrap();
    let mut add = |token: u32, bias: f32| {
        let logit_bias = BTreeMap::from([(token, bias)]);
        engine.add_request(
            &[1],
            &RequestParams {
                logit_bias,
                ..GREEDY
            },
        )
    };
    let outside = vocab_size as u32;
    assert!(matches!(
        add(outside, 1.0),
        Err(ModelError::Sampling(SamplingError::BiasedToken { token, .. })) if token == outside
    ));
    assert!(matches!(
        add(0, f32::NAN),
        Err(ModelError::Sampling(SamplingError::Option {
            option: "logit_bias",
            ..
        }))
    ));
    assert_eq!(add(outside - 1, 1.0).unwrap(), 0);
}

#[test]
fn every_architecture_decodes_what_its_full_pass_predicts() {
    let configs = [
        config(),
        config_with(json!({ "tie_word_embeddings": true, "head_dim": 10 })),
        config_of(Architecture::Mistral, json!({ "sliding_window": 5 })),
        config_of(Architecture::Qwen2, json!({})),
        config_of(Architecture::Qwen3, json!({})),
        config_of(Architecture::Phi3, json!({ "partial_rotary_factor": 0.6 })),
    ];
    for config in configs {
        let model = model(&config);
        let mut tokens = random_tokens(9, config.vocab_size, &mut rng());
        let (new, end) = alone(
            &model,
            &tokens,
            &RequestParams {
                max_new_tokens: 12,
                ..GREEDY
            },
        );
        assert_eq!((new.len(), end), (12, Some(Ok(StopReason::MaxNewTokens))));
        for token in new {
            let logits = model
                .forward_full(token_tensor(&tokens, [1, tokens.len()], &Device::flex()))
                .try_into_vec_as::<f32>()
                .unwrap();
            let last = &logits[(tokens.len() - 1) * config.vocab_size..];
            let best = (0..last.len())
                .max_by(|&a, &b| last[a].total_cmp(&last[b]))
                .unwrap();
            assert!(
                last[best] - last[token as usize] < 1e-4,
                "{}: token {token} instead of {best} after {tokens:?}",
                config.architecture
            );
            tokens.push(token);
        }
    }
}

#[test]
fn a_sequence_ends_at_its_window() {
    let config = config_with(json!({ "max_position_embeddings": 600 }));
    let model = model(&config);
    // The prompt is longer than one prefill chunk.
    let prompt = random_tokens(590, config.vocab_size, &mut rng());
    let (tokens, end) = alone(&model, &prompt, &GREEDY);
    // The last token is chosen from the logits of the last position, and is not in the KV cache.
    assert_eq!((tokens.len(), end), (11, Some(Ok(StopReason::CacheFull))));
    let full = model
        .forward_full(token_tensor(&prompt, [1, 590], &Device::flex()))
        .try_into_vec_as::<f32>()
        .unwrap();
    let last = &full[589 * config.vocab_size..];
    let best = (0..last.len())
        .max_by(|&a, &b| last[a].total_cmp(&last[b]))
        .unwrap();
    assert!(last[best] - last[tokens[0] as usize] < 1e-4);
}

#[test]
fn what_does_not_fit_is_refused_with_the_sizes() {
    let config = config();
    let model = model(&config);
    for slots in [0, 129] {
        assert!(
            matches!(Engine::new(model.clone(), slots), Err(ModelError::TooManySequences { asked, max: 128 }) if asked == slots)
        );
    }
    let mut engine = Engine::new(model.clone(), 1).unwrap();
    assert!(matches!(
        engine.add_request(&[], &GREEDY),
        Err(ModelError::EmptyPrompt)
    ));
    assert!(matches!(
        engine.add_request(&[1; 97], &GREEDY),
        Err(ModelError::PromptTooLong {
            tokens: 97,
            max: 96
        })
    ));
    assert!(matches!(
        engine.add_request(&[1, 71], &GREEDY),
        Err(ModelError::Token {
            token: 71,
            position: 1,
            vocab_size: 71
        })
    ));
    let sampling = Sampling {
        top_k: Some(0),
        ..Sampling::GREEDY
    };
    let refused = engine.add_request(&[1], &RequestParams { sampling, ..GREEDY });
    assert!(matches!(
        refused,
        Err(ModelError::Sampling(SamplingError::Option {
            option: "top_k",
            ..
        }))
    ));
    engine.add_request(&[1], &GREEDY).unwrap();
    let error = engine.add_request(&[1], &GREEDY).expect_err("one slot");
    assert!(
        matches!(error, ModelError::TooManySequences { asked: 2, max: 1 }),
        "{error}"
    );
}

#[test]
fn a_head_is_rounded_by_choice_and_steps_take_it() {
    for tied in [false, true] {
        let fields = json!({ "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied });
        let config = config_with(fields);
        let (_parent, dir) = temporary();
        let mut weights = random_weights(&config, &mut rng());
        write_folder(&dir, &config, &weights, Dtype::F32);
        let float = open(&dir).model;
        let spec = QuantSpec::int8(GroupSize::G32);
        let llama = LanguageModel::open(
            &dir,
            &Device::flex(),
            &OpenOptions {
                head: Some(spec),
                ..options()
            },
        )
        .unwrap();
        let head = llama
            .model
            .projections()
            .find(|(name, _)| name == "lm_head")
            .map(|(_, head)| head.clone());
        assert!(
            matches!(head, Some(Projection::Quant(head)) if head.weight().spec() == spec),
            "tied: {tied}"
        );

        let tokens = random_tokens(9, config.vocab_size, &mut rng());
        let logits = |model: &Model| {
            model
                .forward_full(token_tensor(&tokens, [1, 9], &Device::flex()))
                .try_into_vec_as::<f32>()
                .unwrap()
        };
        let (found, expected) = (
            logits(&llama.model),
            logits(&float)
                .into_iter()
                .map(f64::from)
                .collect::<Vec<_>>(),
        );
        let error = relative_error(&found, &expected);
        assert!(error > 1e-5 && error < 0.01, "tied: {tied}: {error}");
        let (new, _) = alone(
            &llama.model,
            &tokens,
            &RequestParams {
                max_new_tokens: 1,
                ..GREEDY
            },
        );
        let last = &found[8 * config.vocab_size..];
        assert!(
            last.iter()
                .all(|&logit| logit - last[new[0] as usize] < 1e-4),
            "tied: {tied}"
        );

        let name = if tied {
            "model.embed_tokens.weight"
        } else {
            "lm_head.weight"
        };
        weights.get_mut(name).unwrap().1[0] = f32::NAN;
        let (_parent, broken) = temporary();
        write_folder(&broken, &config, &weights, Dtype::F32);
        let error = LanguageModel::open(
            &broken,
            &Device::flex(),
            &OpenOptions {
                head: Some(spec),
                ..options()
            },
        )
        .expect_err("NaN");
        assert!(
            matches!(&error, ModelError::Layer { layer, .. } if layer == "lm_head"),
            "{error}"
        );
    }
}
