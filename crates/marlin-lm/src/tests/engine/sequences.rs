//! Tests that each of several concurrent sequences decodes to the same tokens as alone.

use std::sync::Arc;
use std::thread;

use burn::tensor::{Device, Tensor};
use marlin_testing::repository_file;
use rand::RngExt;
use serde_json::json;

use super::{GREEDY, alone, model};
use crate::tests::support::*;
use crate::{
    Architecture, Engine, Model, RequestParams, Sampling, SamplingError, StepOutput, StopReason,
    Suppression,
};

/// The request of a slot, and the tokens decoded so far.
#[derive(Clone)]
struct Running {
    prompt: Vec<u32>,
    options: RequestParams,
    tokens: Vec<u32>,
}

#[test]
fn sequences_that_join_and_leave_decode_as_if_alone() {
    let config = config();
    let model = model(&config);
    let mut rng = rng();
    let slots = 5;
    let mut engine = Engine::new(model.clone(), slots).unwrap();
    let sampling = Sampling {
        temperature: 0.9,
        top_k: Some(20),
        top_p: 0.95,
        min_p: 0.01,
        repetition_penalty: 1.1,
        presence_penalty: 0.1,
        frequency_penalty: 0.2,
    };
    let mut running: Vec<Option<Running>> = vec![None; slots];
    let mut finished = 0;
    for step in 0..80 {
        while step < 60 && rng.random_bool(0.4) && engine.sequences() < slots {
            let prompt = random_tokens(rng.random_range(1..20), config.vocab_size, &mut rng);
            let sampling = if rng.random_bool(0.5) {
                sampling
            } else {
                Sampling::GREEDY
            };
            let suppression = Suppression {
                suppress_tokens: random_tokens(2, config.vocab_size, &mut rng),
                bad_words_ids: (0..rng.random_range(0..40))
                    .map(|index| random_tokens(1 + index % 2, config.vocab_size, &mut rng))
                    .collect(),
                min_new_tokens: rng.random_range(0..4),
                min_length: rng.random_range(0..12),
            };
            let suppression = if rng.random_bool(0.5) {
                suppression
            } else {
                Suppression::NONE
            };
            let (seed, stop_tokens, max_new_tokens) =
                (rng.random(), vec![5, 6], rng.random_range(1..12));
            let options = RequestParams {
                sampling,
                suppression,
                seed,
                stop_tokens,
                max_new_tokens,
                ..GREEDY
            };
            let slot = engine.add_request(&prompt, &options).unwrap();
            assert!(
                running[slot]
                    .replace(Running {
                        prompt,
                        options,
                        tokens: Vec::new()
                    })
                    .is_none(),
                "slot {slot} was in use"
            );
        }
        for StepOutput { slot, token, end } in engine.step().unwrap() {
            running[slot].as_mut().unwrap().tokens.extend(token);
            if end.is_some() {
                let Running {
                    prompt,
                    options,
                    tokens,
                } = running[slot].take().unwrap();
                assert_eq!(
                    (tokens, end),
                    alone(&model, &prompt, &options),
                    "after {prompt:?}"
                );
                finished += 1;
            }
        }
        // One request is aborted.
        if step == 30
            && let Some(slot) = running.iter().position(Option::is_some)
        {
            engine.abort(slot);
            running[slot] = None;
        }
    }
    assert!(
        engine.step().unwrap().is_empty() && finished > 10,
        "{finished} sequences ended"
    );
}

#[test]
fn a_sequence_goes_on_while_a_long_prompt_is_read() {
    let config = config_with(json!({ "max_position_embeddings": 1400 }));
    let model = model(&config);
    let mut rng = rng();
    let sampling = Sampling {
        temperature: 0.9,
        top_k: None,
        top_p: 0.95,
        repetition_penalty: 1.2,
        ..Sampling::GREEDY
    };
    let options = |seed| RequestParams {
        sampling,
        seed,
        max_new_tokens: 8,
        ..GREEDY
    };
    let prompts =
        [4, 1300, 1, 300, 250].map(|length| random_tokens(length, config.vocab_size, &mut rng));
    let mut engine = Engine::new(model.clone(), prompts.len()).unwrap();
    let mut tokens = vec![Vec::new(); prompts.len()];
    let mut ends = 0;
    let mut order = Vec::new();
    assert_eq!(engine.add_request(&prompts[0], &options(0)).unwrap(), 0);
    for step in 0.. {
        if step == 1 {
            for (slot, prompt) in prompts.iter().enumerate().skip(1) {
                assert_eq!(
                    engine.add_request(prompt, &options(slot as u64)).unwrap(),
                    slot
                );
            }
            // A prompt of one token needs no prefill and is not waiting.
            assert_eq!((engine.sequences(), engine.waiting()), (5, 3));
        }
        if engine.sequences() == 0 {
            break;
        }
        let decoded = engine.step().unwrap();
        order.push(
            decoded
                .iter()
                .map(|decoded| decoded.slot)
                .collect::<Vec<_>>(),
        );
        for StepOutput { slot, token, end } in decoded {
            tokens[slot].extend(token);
            ends += usize::from(end == Some(Ok(StopReason::MaxNewTokens)));
        }
    }
    assert_eq!(
        order[..6],
        [
            vec![0],
            vec![0, 2],
            vec![0, 2],
            vec![0, 1, 2],
            vec![0, 1, 2, 3],
            vec![0, 1, 2, 3, 4]
        ]
    );
    assert_eq!(ends, 5);
    for (slot, prompt) in prompts.iter().enumerate() {
        assert_eq!(
            tokens[slot],
            alone(&model, prompt, &options(slot as u64)).0,
            "slot {slot}"
        );
    }
}

#[test]
fn an_engine_goes_on_on_another_thread() {
    let config = config_with(json!({ "max_position_embeddings": 700 }));
    let model = model(&config);
    let mut rng = rng();
    let prompts = [5, 600].map(|length| random_tokens(length, config.vocab_size, &mut rng));
    let options = RequestParams {
        max_new_tokens: 9,
        ..GREEDY
    };
    let mut engine = Engine::new(model.clone(), 2).unwrap();
    let mut tokens = vec![Vec::new(); 2];
    engine.add_request(&prompts[0], &options).unwrap();
    for round in 0..4 {
        // Each round runs on a thread of its own. The second request is added on one thread, and
        // its prompt is read on others.
        let (moved, decoded) = thread::scope(|scope| {
            let (prompt, options) = (&prompts[1], &options);
            let run = move || {
                let decoded: Vec<StepOutput> =
                    (0..3).flat_map(|_| engine.step().unwrap()).collect();
                if round == 0 {
                    engine.add_request(prompt, options).unwrap();
                }
                (engine, decoded)
            };
            scope.spawn(run).join().unwrap()
        });
        engine = moved;
        for StepOutput { slot, token, .. } in decoded {
            tokens[slot].extend(token);
        }
    }
    while engine.sequences() > 0 {
        for StepOutput { slot, token, .. } in engine.step().unwrap() {
            tokens[slot].extend(token);
        }
    }
    let expected = prompts
        .each_ref()
        .map(|prompt| alone(&model, prompt, &options).0);
    assert_eq!(tokens, expected);
}

#[test]
fn two_engines_of_a_model_run_on_two_threads() {
    let config = config();
    let model = model(&config);
    let mut rng = rng();
    let prompts = [6, 30].map(|length| random_tokens(length, config.vocab_size, &mut rng));
    let options = RequestParams {
        max_new_tokens: 12,
        ..GREEDY
    };
    let expected = prompts
        .each_ref()
        .map(|prompt| alone(&model, prompt, &options));
    let found = prompts.map(|prompt| {
        let (model, options) = (model.clone(), options.clone());
        thread::spawn(move || alone(&model, &prompt, &options))
    });
    assert_eq!(found.map(|thread| thread.join().unwrap()), expected);
}

#[test]
fn a_sequence_that_fails_leaves_the_others_running() {
    let golden = repository_file("tests/golden/moe-gptq-int4-g32-asym-act-order");
    for model in [
        model(&config()),
        model(&config_of(Architecture::Qwen2Moe, json!({}))),
        open(&golden).model,
    ] {
        fails_alone(model);
    }
}

/// Checks a model, of which one of two sequences has activations that are NaN. In a mixture they
/// reach the router.
fn fails_alone(model: Arc<Model>) {
    let mut model = Arc::unwrap_or_clone(model);
    let hidden = model.config().hidden_size;
    // The embedding of token 3 is NaN: every sequence with this token fails.
    let table = model.embed_tokens.weight.val();
    let broken = Tensor::full([1, hidden], f32::NAN, &Device::flex());
    model.embed_tokens.weight = crate::model::loaded(table.slice_assign([3..4, 0..hidden], broken));
    let model = Arc::new(model);
    let expected = alone(
        &model,
        &[1, 2, 4],
        &RequestParams {
            max_new_tokens: 4,
            stop_tokens: vec![3],
            ..GREEDY
        },
    );

    let mut engine = Engine::new(model.clone(), 2).unwrap();
    let good = engine
        .add_request(
            &[1, 2, 4],
            &RequestParams {
                max_new_tokens: 4,
                stop_tokens: vec![3],
                ..GREEDY
            },
        )
        .unwrap();
    let bad = engine.add_request(&[1, 3, 4], &GREEDY).unwrap();
    let mut tokens = Vec::new();
    let mut ends = vec![None; 2];
    while engine.sequences() > 0 {
        for StepOutput { slot, token, end } in engine.step().unwrap() {
            if slot == good {
                tokens.extend(token);
            }
            ends[slot] = end.or(ends[slot].take());
        }
    }
    assert_eq!(ends[bad], Some(Err(SamplingError::NoToken)));
    assert_eq!((tokens, ends[good].clone()), expected);
}
