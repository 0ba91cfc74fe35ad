//! Several sequences at once, on random models.

use std::sync::Arc;
use std::thread;

use burn::tensor::{Device, Tensor};
use marlin_format::checkpoint::Dtype;
use marlin_format::{GroupSize, QuantSpec};
use rand::RngExt;
use serde_json::json;

use super::support::*;
use crate::tokens::token_tensor;
use crate::{
    Architecture, Decoded, Decoder, Llama, LlamaConfig, LlamaError, LlamaModel, OpenOptions, Projection, Sampling, SamplingError,
    SequenceOptions, StopReason, Suppression,
};

const GREEDY: SequenceOptions = SequenceOptions {
    sampling: Sampling::GREEDY,
    suppression: Suppression::NONE,
    seed: 0,
    stop_tokens: Vec::new(),
    max_new_tokens: usize::MAX,
};

fn model(config: &LlamaConfig) -> Arc<LlamaModel> {
    let (_parent, dir) = temporary();
    write_folder(&dir, config, &random_weights(config, &mut rng()), Dtype::F32);
    open(&dir).model
}

/// The tokens that follow a prompt decoded by itself, and its stop reason.
fn alone(model: &Arc<LlamaModel>, prompt: &[u32], options: &SequenceOptions) -> (Vec<u32>, Option<Result<StopReason, SamplingError>>) {
    let mut decoder = Decoder::new(model.clone(), 1).unwrap();
    let slot = decoder.join(prompt, options).unwrap();
    let mut tokens = Vec::new();
    loop {
        let decoded = decoder.step().unwrap();
        let [Decoded { slot: found, token, end }] = &decoded[..] else { panic!("{decoded:?}") };
        assert_eq!(*found, slot);
        tokens.extend(token);
        if end.is_some() {
            assert_eq!(decoder.sequences(), 0);
            return (tokens, end.clone());
        }
    }
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
        let (new, end) = alone(&model, &tokens, &SequenceOptions { max_new_tokens: 12, ..GREEDY });
        assert_eq!((new.len(), end), (12, Some(Ok(StopReason::MaxNewTokens))));
        for token in new {
            let logits = model.forward_full(token_tensor(&tokens, [1, tokens.len()], &Device::flex())).try_into_vec_as::<f32>().unwrap();
            let last = &logits[(tokens.len() - 1) * config.vocab_size..];
            let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
            assert!(last[best] - last[token as usize] < 1e-4, "{}: token {token} instead of {best} after {tokens:?}", config.architecture);
            tokens.push(token);
        }
    }
}

/// A sequence of a slot, and its result.
#[derive(Clone)]
struct Running {
    prompt: Vec<u32>,
    options: SequenceOptions,
    tokens: Vec<u32>,
}

#[test]
fn sequences_that_join_and_leave_decode_as_if_alone() {
    let config = config();
    let model = model(&config);
    let mut rng = rng();
    let slots = 5;
    let mut decoder = Decoder::new(model.clone(), slots).unwrap();
    let sampling = Sampling { temperature: 0.9, top_k: Some(20), top_p: 0.95, min_p: 0.01, repetition_penalty: 1.1 };
    let mut running: Vec<Option<Running>> = vec![None; slots];
    let mut finished = 0;
    for step in 0..80 {
        while step < 60 && rng.random_bool(0.4) && decoder.sequences() < slots {
            let prompt = random_tokens(rng.random_range(1..20), config.vocab_size, &mut rng);
            let sampling = if rng.random_bool(0.5) { sampling } else { Sampling::GREEDY };
            let suppression = Suppression {
                suppress_tokens: random_tokens(2, config.vocab_size, &mut rng),
                bad_words_ids: (0..rng.random_range(0..40))
                    .map(|index| random_tokens(1 + index % 2, config.vocab_size, &mut rng))
                    .collect(),
                min_new_tokens: rng.random_range(0..4),
                min_length: rng.random_range(0..12),
            };
            let suppression = if rng.random_bool(0.5) { suppression } else { Suppression::NONE };
            let (seed, stop_tokens, max_new_tokens) = (rng.random(), vec![5, 6], rng.random_range(1..12));
            let options = SequenceOptions { sampling, suppression, seed, stop_tokens, max_new_tokens };
            let slot = decoder.join(&prompt, &options).unwrap();
            assert!(running[slot].replace(Running { prompt, options, tokens: Vec::new() }).is_none(), "slot {slot} was in use");
        }
        for Decoded { slot, token, end } in decoder.step().unwrap() {
            running[slot].as_mut().unwrap().tokens.extend(token);
            if end.is_some() {
                let Running { prompt, options, tokens } = running[slot].take().unwrap();
                assert_eq!((tokens, end), alone(&model, &prompt, &options), "after {prompt:?}");
                finished += 1;
            }
        }
        // One is taken out early.
        if step == 30
            && let Some(slot) = running.iter().position(Option::is_some)
        {
            decoder.leave(slot);
            running[slot] = None;
        }
    }
    assert!(decoder.step().unwrap().is_empty() && finished > 10, "{finished} sequences ended");
}

#[test]
fn a_sequence_goes_on_while_a_long_prompt_is_read() {
    let config = config_with(json!({ "max_position_embeddings": 1400 }));
    let model = model(&config);
    let mut rng = rng();
    let sampling = Sampling { temperature: 0.9, top_k: None, top_p: 0.95, repetition_penalty: 1.2, ..Sampling::GREEDY };
    let options = |seed| SequenceOptions { sampling, seed, max_new_tokens: 8, ..GREEDY };
    let prompts = [4, 1300, 1, 300, 250].map(|length| random_tokens(length, config.vocab_size, &mut rng));
    let mut decoder = Decoder::new(model.clone(), prompts.len()).unwrap();
    let mut tokens = vec![Vec::new(); prompts.len()];
    let mut ends = 0;
    let mut order = Vec::new();
    assert_eq!(decoder.join(&prompts[0], &options(0)).unwrap(), 0);
    for step in 0.. {
        if step == 1 {
            for (slot, prompt) in prompts.iter().enumerate().skip(1) {
                assert_eq!(decoder.join(prompt, &options(slot as u64)).unwrap(), slot);
            }
            // A prompt of one token has nothing to be read.
            assert_eq!((decoder.sequences(), decoder.waiting()), (5, 3));
        }
        if decoder.sequences() == 0 {
            break;
        }
        let decoded = decoder.step().unwrap();
        order.push(decoded.iter().map(|decoded| decoded.slot).collect::<Vec<_>>());
        for Decoded { slot, token, end } in decoded {
            tokens[slot].extend(token);
            ends += usize::from(end == Some(Ok(StopReason::MaxNewTokens)));
        }
    }
    assert_eq!(order[..6], [vec![0], vec![0, 2], vec![0, 2], vec![0, 1, 2], vec![0, 1, 2, 3], vec![0, 1, 2, 3, 4]]);
    assert_eq!(ends, 5);
    for (slot, prompt) in prompts.iter().enumerate() {
        assert_eq!(tokens[slot], alone(&model, prompt, &options(slot as u64)).0, "slot {slot}");
    }
}

#[test]
fn a_decoder_goes_on_on_another_thread() {
    let config = config_with(json!({ "max_position_embeddings": 700 }));
    let model = model(&config);
    let mut rng = rng();
    let prompts = [5, 600].map(|length| random_tokens(length, config.vocab_size, &mut rng));
    let options = SequenceOptions { max_new_tokens: 9, ..GREEDY };
    let mut decoder = Decoder::new(model.clone(), 2).unwrap();
    let mut tokens = vec![Vec::new(); 2];
    decoder.join(&prompts[0], &options).unwrap();
    for round in 0..4 {
        // A thread for each of them; one joins on another thread than it is read on.
        let (moved, decoded) = thread::scope(|scope| {
            let (prompt, options) = (&prompts[1], &options);
            let run = move || {
                let decoded: Vec<Decoded> = (0..3).flat_map(|_| decoder.step().unwrap()).collect();
                if round == 0 {
                    decoder.join(prompt, options).unwrap();
                }
                (decoder, decoded)
            };
            scope.spawn(run).join().unwrap()
        });
        decoder = moved;
        for Decoded { slot, token, .. } in decoded {
            tokens[slot].extend(token);
        }
    }
    while decoder.sequences() > 0 {
        for Decoded { slot, token, .. } in decoder.step().unwrap() {
            tokens[slot].extend(token);
        }
    }
    let expected = prompts.each_ref().map(|prompt| alone(&model, prompt, &options).0);
    assert_eq!(tokens, expected);
}

#[test]
fn two_decoders_of_a_model_run_on_two_threads() {
    let config = config();
    let model = model(&config);
    let mut rng = rng();
    let prompts = [6, 30].map(|length| random_tokens(length, config.vocab_size, &mut rng));
    let options = SequenceOptions { max_new_tokens: 12, ..GREEDY };
    let expected = prompts.each_ref().map(|prompt| alone(&model, prompt, &options));
    let found = prompts.map(|prompt| {
        let (model, options) = (model.clone(), options.clone());
        thread::spawn(move || alone(&model, &prompt, &options))
    });
    assert_eq!(found.map(|thread| thread.join().unwrap()), expected);
}

#[test]
fn a_sequence_that_fails_leaves_the_others_running() {
    let config = config();
    let mut model = Arc::unwrap_or_clone(model(&config));
    // Token 3 breaks every sequence that has it.
    let table = model.embed_tokens.weight.val();
    let broken = Tensor::full([1, config.hidden_size], f32::NAN, &Device::flex());
    model.embed_tokens.weight = crate::model::loaded(table.slice_assign([3..4, 0..config.hidden_size], broken));
    let model = Arc::new(model);
    let expected = alone(&model, &[1, 2, 4], &SequenceOptions { max_new_tokens: 4, stop_tokens: vec![3], ..GREEDY });

    let mut decoder = Decoder::new(model.clone(), 2).unwrap();
    let good = decoder.join(&[1, 2, 4], &SequenceOptions { max_new_tokens: 4, stop_tokens: vec![3], ..GREEDY }).unwrap();
    let bad = decoder.join(&[1, 3, 4], &GREEDY).unwrap();
    let mut tokens = Vec::new();
    let mut ends = vec![None; 2];
    while decoder.sequences() > 0 {
        for Decoded { slot, token, end } in decoder.step().unwrap() {
            if slot == good {
                tokens.extend(token);
            }
            ends[slot] = end.or(ends[slot].take());
        }
    }
    assert_eq!(ends[bad], Some(Err(SamplingError::NoToken)));
    assert_eq!((tokens, ends[good].clone()), expected);
}

#[test]
fn a_sequence_ends_at_its_window() {
    let config = config_with(json!({ "max_position_embeddings": 600 }));
    let model = model(&config);
    // More than one chunk of prefill.
    let prompt = random_tokens(590, config.vocab_size, &mut rng());
    let (tokens, end) = alone(&model, &prompt, &GREEDY);
    // The last one is chosen from the logits of the last position, and is not in the cache.
    assert_eq!((tokens.len(), end), (11, Some(Ok(StopReason::CacheFull))));
    let full = model.forward_full(token_tensor(&prompt, [1, 590], &Device::flex())).try_into_vec_as::<f32>().unwrap();
    let last = &full[589 * config.vocab_size..];
    let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
    assert!(last[best] - last[tokens[0] as usize] < 1e-4);
}

#[test]
fn what_does_not_fit_is_refused_with_the_sizes() {
    let config = config();
    let model = model(&config);
    for slots in [0, 129] {
        assert!(matches!(Decoder::new(model.clone(), slots), Err(LlamaError::TooManySequences { asked, room: 128 }) if asked == slots));
    }
    let mut decoder = Decoder::new(model.clone(), 1).unwrap();
    assert!(matches!(decoder.join(&[], &GREEDY), Err(LlamaError::EmptyPrompt)));
    assert!(matches!(decoder.join(&[1; 97], &GREEDY), Err(LlamaError::PromptTooLong { tokens: 97, room: 96 })));
    assert!(matches!(decoder.join(&[1, 71], &GREEDY), Err(LlamaError::Token { token: 71, position: 1, vocab_size: 71 })));
    let sampling = Sampling { top_k: Some(0), ..Sampling::GREEDY };
    let refused = decoder.join(&[1], &SequenceOptions { sampling, ..GREEDY });
    assert!(matches!(refused, Err(LlamaError::Sampling(SamplingError::Option { option: "top_k", .. }))));
    decoder.join(&[1], &GREEDY).unwrap();
    let error = decoder.join(&[1], &GREEDY).expect_err("one slot");
    assert!(matches!(error, LlamaError::TooManySequences { asked: 2, room: 1 }), "{error}");
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
        let llama = Llama::open(&dir, &Device::flex(), &OpenOptions { head: Some(spec), ..options() }).unwrap();
        let head = llama.model.projections().find(|(name, _)| name == "lm_head").map(|(_, head)| head.clone());
        assert!(matches!(head, Some(Projection::Quant(head)) if head.weight().spec() == spec), "tied: {tied}");

        let tokens = random_tokens(9, config.vocab_size, &mut rng());
        let logits =
            |model: &LlamaModel| model.forward_full(token_tensor(&tokens, [1, 9], &Device::flex())).try_into_vec_as::<f32>().unwrap();
        let (found, expected) = (logits(&llama.model), logits(&float).into_iter().map(f64::from).collect::<Vec<_>>());
        let error = relative_error(&found, &expected);
        assert!(error > 1e-5 && error < 0.01, "tied: {tied}: {error}");
        let (new, _) = alone(&llama.model, &tokens, &SequenceOptions { max_new_tokens: 1, ..GREEDY });
        let last = &found[8 * config.vocab_size..];
        assert!(last.iter().all(|&logit| logit - last[new[0] as usize] < 1e-4), "tied: {tied}");

        let name = if tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        weights.get_mut(name).unwrap().1[0] = f32::NAN;
        let (_parent, broken) = temporary();
        write_folder(&broken, &config, &weights, Dtype::F32);
        let error = Llama::open(&broken, &Device::flex(), &OpenOptions { head: Some(spec), ..options() }).expect_err("NaN");
        assert!(matches!(&error, LlamaError::Layer { layer, .. } if layer == "lm_head"), "{error}");
    }
}
