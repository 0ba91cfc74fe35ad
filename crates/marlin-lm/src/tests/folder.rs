//! Tests that folders of float, sharded and quantised models open, and that saved models open
//! again.

use burn::tensor::{Device, FloatDType};
use marlin_format::checkpoint::{Checkpoint, Dtype};
use marlin_format::{GroupSize, QuantSpec};
use serde_json::json;

use super::support::*;
use crate::tokens::token_tensor;
use crate::{
    LanguageModel, Model, ModelConfig, ModelError, OpenOptions, Projection, Sampling, Suppression,
    save_float,
};

pub(super) fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    model
        .forward_full(token_tensor(tokens, [1, tokens.len()], &model.device()))
        .try_into_vec_as::<f32>()
        .unwrap()
}

#[test]
fn a_saved_model_opens_with_equal_logits() {
    let mut rng = rng();
    for fields in [
        json!({}),
        json!({ "tie_word_embeddings": true, "attention_bias": true }),
    ] {
        let config = config_with(fields);
        let model = Model::new(&config, &Device::flex());
        let (_parent, dir) = temporary();
        save_float(&model, &config, &dir, FloatDType::F32).unwrap();
        let opened = open(&dir).model;
        assert_eq!(
            opened.config(),
            &ModelConfig {
                dtype: Some(FloatDType::F32),
                ..config.clone()
            }
        );
        let tokens = random_tokens(10, config.vocab_size, &mut rng);
        assert_eq!(logits(&opened, &tokens), logits(&model, &tokens));
        assert_eq!(
            Checkpoint::open(&dir).unwrap().contains("lm_head.weight"),
            !config.tie_word_embeddings
        );
    }
}

#[test]
fn a_model_saved_in_half_precision_holds_the_rounded_weights() {
    let mut rng = rng();
    let config = config_with(json!({ "tie_word_embeddings": true }));
    let weights = random_weights(&config, &mut rng);
    for (dtype, file, name) in [
        (FloatDType::F16, Dtype::F16, "float16"),
        (FloatDType::BF16, Dtype::BF16, "bfloat16"),
    ] {
        let ((_a, first), (_b, second)) = (temporary(), temporary());
        write_folder(&first, &config, &weights, Dtype::F32);
        save_float(&open(&first).model, &config, &second, dtype).unwrap();
        let saved = Checkpoint::open(&second).unwrap();
        assert!(saved.names().eq(weights.keys().map(String::as_str)));
        for (tensor, (shape, values)) in &weights {
            let view = saved.tensor(tensor).unwrap();
            assert_eq!(
                (view.dtype(), view.shape()),
                (file, shape.as_slice()),
                "{tensor}"
            );
            assert_eq!(view.bytes(), bytes(values, file), "{tensor}");
        }
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(second.join("config.json")).unwrap()).unwrap();
        assert_eq!(json["torch_dtype"], name);
    }
}

#[test]
fn shards_open_as_one_file_does() {
    let mut rng = rng();
    let config = config();
    let weights = random_weights(&config, &mut rng);
    let ((_a, single), (_b, sharded)) = (temporary(), temporary());
    write_folder(&single, &config, &weights, Dtype::F32);
    write_sharded(&sharded, &config, &weights, 3);
    let tokens = random_tokens(6, config.vocab_size, &mut rng);
    assert_eq!(
        logits(&open(&single).model, &tokens),
        logits(&open(&sharded).model, &tokens)
    );
}

#[test]
fn redundant_tensors_of_older_files_are_left_out() {
    let mut rng = rng();
    let config = config_with(json!({ "tie_word_embeddings": true }));
    let mut weights = random_weights(&config, &mut rng);
    weights.insert(
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        (vec![3], vec![1.0; 3]),
    );
    weights.insert(
        "lm_head.weight".into(),
        weights["model.embed_tokens.weight"].clone(),
    );
    // Scales of an 8-bit KV cache, as llm-compressor writes them.
    weights.insert(
        "model.layers.0.self_attn.k_scale".into(),
        (vec![1], vec![0.5]),
    );
    weights.insert(
        "model.layers.0.self_attn.v_scale".into(),
        (vec![1], vec![0.5]),
    );
    let (_parent, dir) = temporary();
    write_folder(&dir, &config, &weights, Dtype::F32);
    assert!(
        open(&dir).model.lm_head.is_none(),
        "the same head twice is a tied one"
    );
}

/// Tests that an lm_head in the file is used even if the config ties it to the embedding.
/// transformers 5 also uses the lm_head in the file; transformers 4.51 used the embedding.
#[test]
fn a_head_of_its_own_counts_whatever_the_config_says() {
    let mut rng = rng();
    let (tied, untied) = (
        config_with(json!({ "tie_word_embeddings": true })),
        config(),
    );
    let weights = random_weights(&untied, &mut rng);
    let ((_a, first), (_b, second), (_c, saved)) = (temporary(), temporary(), temporary());
    write_folder(&first, &tied, &weights, Dtype::F32);
    write_folder(&second, &untied, &weights, Dtype::F32);
    let tokens = random_tokens(6, tied.vocab_size, &mut rng);
    let opened = open(&first);
    assert_eq!(
        logits(&opened.model, &tokens),
        logits(&open(&second).model, &tokens)
    );
    // The model is saved with its own lm_head.
    save_float(
        &opened.model,
        opened.model.config(),
        &saved,
        FloatDType::F32,
    )
    .unwrap();
    assert_eq!(
        logits(&open(&saved).model, &tokens),
        logits(&opened.model, &tokens)
    );
}

#[test]
fn quantised_projections_compute_what_their_dequantised_weights_do() {
    let mut rng = rng();
    let config = config_with(
        json!({ "hidden_size": 64, "head_dim": 32, "intermediate_size": 40, "attention_bias": true }),
    );
    let weights = random_weights(&config, &mut rng);
    for spec in [
        QuantSpec::int4(GroupSize::G32),
        QuantSpec::int4(GroupSize::Channel).with_zero_points(),
    ] {
        let ((_a, quantized), (_b, float)) = (temporary(), temporary());
        let dequantized = write_quantized(&quantized, &config, &weights, |layer| {
            (layer.ends_with("_proj") && !layer.ends_with("down_proj")).then_some(spec)
        });
        write_folder(&float, &config, &dequantized, Dtype::F32);
        let (quantized, float) = (open(&quantized).model, open(&float).model);
        let layer = &quantized.layers[1];
        let Some(joined @ Projection::Quant(_)) = layer.attention().qkv_proj.joined() else {
            panic!("q, k and v are one 4-bit matmul")
        };
        assert_eq!(joined.dims(), [64, 192 + 2 * 64]);
        assert!(matches!(
            layer.mlp().unwrap().down_proj.joined(),
            Some(Projection::Dense(_))
        ));
        let tokens = random_tokens(9, config.vocab_size, &mut rng);
        let expected: Vec<f64> = logits(&float, &tokens).into_iter().map(f64::from).collect();
        let error = relative_error(&logits(&quantized, &tokens), &expected);
        assert!(error < 1e-4, "{spec}: {error}");

        let mut restored = Model::clone(&quantized);
        restored.dequantize();
        assert!(
            restored
                .projections()
                .all(|(_, projection)| matches!(projection, Projection::Dense(_)))
        );
        let (_c, saved) = temporary();
        save_float(&restored, &config, &saved, FloatDType::F32).unwrap();
        let saved = Checkpoint::open(&saved).unwrap();
        for (tensor, (_, values)) in &dequantized {
            assert_eq!(
                saved.tensor(tensor).unwrap().to_f32().unwrap(),
                *values,
                "{spec}: {tensor}"
            );
        }
    }
}

#[test]
fn generation_config_and_length_are_read() {
    let mut rng = rng();
    let config = config_with(json!({ "max_position_embeddings": 8192, "eos_token_id": [2, 5] }));
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        &config,
        &random_weights(&config, &mut rng),
        Dtype::F32,
    );
    let llama = open(&dir);
    assert_eq!(llama.model.max_len(), OpenOptions::DEFAULT_MAX_LEN);
    assert_eq!(
        (
            llama.generation.sampling,
            llama.generation.eos_token_ids.as_slice()
        ),
        (Sampling::GREEDY, &[2, 5][..])
    );

    let write = |json: serde_json::Value| {
        std::fs::write(dir.join("generation_config.json"), json.to_string()).unwrap()
    };
    write(json!({ "do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 7 }));
    let llama = LanguageModel::open(
        &dir,
        &Device::flex(),
        &OpenOptions {
            max_len: Some(8192),
            ..options()
        },
    )
    .unwrap();
    assert_eq!(llama.model.max_len(), 8192);
    let sampling = Sampling {
        temperature: 0.6,
        top_k: Some(50),
        top_p: 0.9,
        ..Sampling::GREEDY
    };
    assert_eq!(
        (
            llama.generation.sampling,
            llama.generation.eos_token_ids.as_slice()
        ),
        (sampling, &[7][..])
    );

    write(json!({ "do_sample": true, "top_k": 0, "repetition_penalty": 1.1 }));
    assert_eq!(
        open(&dir).generation.sampling,
        Sampling {
            temperature: 1.0,
            repetition_penalty: 1.1,
            ..Sampling::GREEDY
        }
    );
    write(json!({ "temperature": 0.6, "min_p": 0.1 }));
    assert_eq!(open(&dir).generation.sampling, Sampling::GREEDY);

    let lists = json!({ "suppress_tokens": [4, -1], "bad_words_ids": [[6], [7, 8]], "min_length": 9, "min_p": 0.1 });
    write(lists.clone());
    let suppression = Suppression {
        suppress_tokens: vec![4],
        bad_words_ids: vec![vec![6], vec![7, 8]],
        min_new_tokens: 0,
        min_length: 9,
    };
    let generation = open(&dir).generation;
    assert_eq!(
        (generation.sampling, &generation.suppression),
        (Sampling::GREEDY, &suppression)
    );
    let mut lists = lists;
    lists["do_sample"] = json!(true);
    lists["min_new_tokens"] = json!(3);
    write(lists);
    let generation = open(&dir).generation;
    assert_eq!(
        generation.suppression,
        Suppression {
            min_new_tokens: 3,
            min_length: 0,
            ..suppression
        }
    );
    assert_eq!(
        generation.sampling,
        Sampling {
            temperature: 1.0,
            top_k: Some(50),
            min_p: 0.1,
            ..Sampling::GREEDY
        }
    );
    for (fields, word) in [
        (json!({ "do_sample": true, "min_p": 1.5 }), "min_p is 1.5"),
        (json!({ "bad_words_ids": [[1], []] }), "bad word 1"),
    ] {
        write(fields);
        let error = LanguageModel::open(&dir, &Device::flex(), &options())
            .expect_err("outside of its range");
        let ModelError::GenerationConfig { source, .. } = &error else {
            panic!("{error}")
        };
        assert!(source.to_string().contains(word), "{source}");
    }
}
