//! Engines that are created on another thread than their model, and continue on further threads.

use super::{PROMPTS, open, records_graphs};
use crate::llama::quantised;
use burn::tensor::{Device, FloatDType};
use marlin_lm::{Engine, Model, ModelConfig, RequestParams, StepOutput};
use std::sync::Arc;
use std::thread;

pub(super) fn on_other_threads(device: &Device) {
    let (_guard, folder) = quantised();
    let llama = open(&folder, device, FloatDType::F32);
    let tokenizer = llama.tokenizer().unwrap_or_else(|error| panic!("{error}"));
    let prompts = PROMPTS.map(|prompt| {
        tokenizer
            .encode(prompt)
            .unwrap_or_else(|error| panic!("{error}"))
    });
    assert_same_on_other_threads(&llama.model, &prompts, 30);
}

/// Checks a model of one layer with random weights and few tokens, because CubeCL's CPU runtime
/// compiles kernels for each length.
pub(super) fn small_on_other_threads(device: &Device) {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "eos_token_id": 2,
    });
    let config =
        ModelConfig::from_json(&config.to_string()).unwrap_or_else(|error| panic!("{error}"));
    let model = Model::random(&config, 64, FloatDType::F32, None, device)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_same_on_other_threads(&Arc::new(model), &[vec![1, 2, 3], vec![5; 3]], 5);
}

/// Checks an engine that is created on another thread than the model and moved to a new thread
/// every few steps. It must give the same tokens as on one thread, and still replay graphs.
fn assert_same_on_other_threads(model: &Arc<Model>, prompts: &[Vec<u32>], max_new_tokens: usize) {
    let options = RequestParams {
        max_new_tokens,
        ..RequestParams::default()
    };
    let add = |engine: &mut Engine, index: usize| {
        let slot = engine
            .add_request(&prompts[index], &options)
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(slot, index);
    };
    let steps = |engine: &mut Engine, tokens: &mut [Vec<u32>]| {
        for _ in 0..2 {
            for StepOutput { slot, token, .. } in
                engine.step().unwrap_or_else(|error| panic!("{error}"))
            {
                tokens[slot].extend(token);
            }
        }
    };
    let run = |threads: bool| {
        let mut tokens = vec![Vec::new(); prompts.len()];
        let new =
            || Engine::new(model.clone(), prompts.len()).unwrap_or_else(|error| panic!("{error}"));
        let on_thread = |engine: &mut Engine, tokens: &mut Vec<Vec<u32>>| match threads {
            true => thread::scope(|scope| {
                scope.spawn(|| steps(engine, tokens));
            }),
            false => steps(engine, tokens),
        };
        let mut engine = if threads {
            thread::scope(|scope| scope.spawn(new).join())
                .unwrap_or_else(|_| panic!("an engine cannot be made on another thread"))
        } else {
            new()
        };
        for index in 0..prompts.len() {
            add(&mut engine, index);
            on_thread(&mut engine, &mut tokens);
        }
        while engine.sequences() > 0 {
            on_thread(&mut engine, &mut tokens);
        }
        assert_eq!(
            engine.is_captured(),
            records_graphs(&model.device()),
            "steps replayed as graphs"
        );
        tokens
    };
    let expected = run(false);
    assert!(
        expected.iter().all(|tokens| tokens.len() == max_new_tokens),
        "{expected:?}"
    );
    assert_eq!(run(true), expected);
}
