//! Tests of engines of split models against engines of whole ones.

use std::collections::BTreeMap;
use std::sync::Arc;

use marlin_nn::TokenLogprobs;

use super::*;
use crate::parallel::RankState;
use crate::tokens::token_tensor;
use crate::{
    BatchEngine, BatchOutput, CacheFormat, DecodeToken, Engine, Model, Pages, PromptPart,
    RequestParams, Sampling, StepOutput,
};

/// The largest difference of log probabilities in f32 between one device and several.
const LOGPROB_TOLERANCE: f32 = 1e-3;

/// Writes a random model, and opens it whole and on `count` ranks.
fn whole_and_split(config: &ModelConfig, count: usize) -> [Arc<Model>; 2] {
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        config,
        &random_weights(config, &mut rng()),
        Dtype::F32,
    );
    [open(&dir).model, open_split(&dir, count).unwrap().model]
}

/// Greedy and sampled requests, with penalties, biases and suppressed tokens.
fn requests(config: &ModelConfig) -> Vec<(Vec<u32>, RequestParams)> {
    let mut rng = rng();
    let params = |sampling, max_new_tokens| RequestParams {
        sampling,
        max_new_tokens,
        seed: 7,
        ..RequestParams::GREEDY
    };
    let sampled = Sampling {
        temperature: 0.9,
        top_k: Some(30),
        top_p: 0.95,
        ..Sampling::GREEDY
    };
    let mut all = vec![
        params(Sampling::GREEDY, 30),
        params(sampled, 20),
        params(
            Sampling {
                repetition_penalty: 1.2,
                ..sampled
            },
            25,
        ),
        RequestParams {
            logit_bias: BTreeMap::from([(3, 2.0), (5, -100.0)]),
            ..params(
                Sampling {
                    presence_penalty: 0.4,
                    frequency_penalty: 0.3,
                    ..Sampling::GREEDY
                },
                35,
            )
        },
    ];
    let mut suppressing = params(Sampling::GREEDY, 22);
    suppressing.suppression.suppress_tokens = vec![1, 2, 4];
    suppressing.suppression.bad_words_ids = vec![vec![6, 7], vec![8]];
    all.push(suppressing);
    let prompt = |index| random_tokens(3 + 5 * index, config.vocab_size, &mut rng);
    let prompts: Vec<Vec<u32>> = (0..all.len()).map(prompt).collect();
    prompts.into_iter().zip(all).collect()
}

/// Decodes requests in an engine of two slots, which sequences join and leave. Returns the tokens
/// of each request.
fn decode(model: &Arc<Model>, requests: &[(Vec<u32>, RequestParams)]) -> Vec<Vec<u32>> {
    let mut engine = Engine::new(model.clone(), 2).unwrap();
    let mut found = vec![Vec::new(); requests.len()];
    let (mut next, mut slots) = (0, BTreeMap::new());
    while next < requests.len() || engine.sequences() > 0 {
        while next < requests.len() && engine.sequences() < 2 {
            let (prompt, params) = &requests[next];
            slots.insert(engine.add_request(prompt, params).unwrap(), next);
            next += 1;
        }
        for StepOutput { slot, token, end } in engine.step().unwrap() {
            found[slots[&slot]].extend(token);
            assert!(!matches!(end, Some(Err(_))), "{end:?}");
        }
    }
    found
}

/// Checks that two models continue prompts with the same tokens. Where a token differs, the two
/// must be nearly as likely: then the texts after it differ, too.
fn expect_same(
    whole: &Arc<Model>,
    requests: &[(Vec<u32>, RequestParams)],
    [expected, found]: [&[Vec<u32>]; 2],
) {
    let mut differing = 0;
    for (((prompt, params), expected), found) in requests.iter().zip(expected).zip(found) {
        assert_eq!(expected.len(), found.len());
        let Some(at) = (0..expected.len()).find(|&at| expected[at] != found[at]) else {
            continue;
        };
        differing += 1;
        // Only a greedy choice has a margin that a test can know.
        if params.sampling == Sampling::GREEDY && params.logit_bias.is_empty() {
            let tokens = [prompt.as_slice(), &expected[..at]].concat();
            let logits = full(whole, &tokens, 1);
            let last = &logits[logits.len() - whole.config().vocab_size..];
            let margin = last[expected[at] as usize] - last[found[at] as usize];
            assert!(margin.abs() < 1e-4, "token {at}: a margin of {margin}");
        }
    }
    // A draw that falls on the border of two tokens is a matter of one in thousands.
    assert!(
        differing <= 1,
        "{differing} of {} texts differ",
        requests.len()
    );
}

#[test]
fn engines_of_split_models_choose_the_tokens_of_one_device() {
    let tied = json!({ "tie_word_embeddings": true, "num_key_value_heads": 1 });
    for (config, count) in [
        (config(), 2),
        (config(), 6),
        (config_with(tied), 3),
        (config_of(Architecture::GptOss, json!({})), 2),
        (config_of(Architecture::Qwen2Moe, json!({})), 2),
    ] {
        let [whole, split] = whole_and_split(&config, count);
        let requests = requests(&config);
        let [expected, found] = [&whole, &split].map(|model| decode(model, &requests));
        expect_same(&whole, &requests, [&expected, &found]);
    }
}

#[test]
fn prompts_longer_than_a_chunk_are_read_on_all_ranks() {
    let config = config_with(json!({ "max_position_embeddings": 640 }));
    let [whole, split] = whole_and_split(&config, 2);
    let prompt = random_tokens(600, config.vocab_size, &mut rng());
    let params = RequestParams {
        max_new_tokens: 8,
        ..RequestParams::GREEDY
    };
    let requests = [(prompt, params)];
    let [expected, found] = [&whole, &split].map(|model| decode(model, &requests));
    expect_same(&whole, &requests, [&expected, &found]);
}

/// Decodes two prompts in a batch engine over pages, and returns the tokens with their log
/// probabilities.
fn decode_batch(model: &Arc<Model>, prompts: &[Vec<u32>; 2]) -> Vec<(u32, TokenLogprobs)> {
    let pages = Pages { count: 8, size: 16 };
    let format = CacheFormat::Activations;
    let mut engine = BatchEngine::new(model.clone(), 2, pages, format).unwrap();
    // The pages of the two sequences alternate.
    let pages: [Vec<u32>; 2] = [vec![6, 4, 2, 0], vec![1, 3, 5, 7]];
    for (slot, prompt) in prompts.iter().enumerate() {
        let params = RequestParams::GREEDY;
        engine
            .add(slot, prompt, prompt.len(), &params, Some(3))
            .unwrap();
    }
    let mut outputs = Vec::new();
    let mut keep = |found: Vec<BatchOutput>| {
        for output in found {
            match output {
                BatchOutput::Token { token, logprobs } => outputs.push((token, logprobs.unwrap())),
                other => panic!("{other:?}"),
            }
        }
    };
    let parts: Vec<PromptPart<'_>> = prompts
        .iter()
        .zip(&pages)
        .enumerate()
        .map(|(slot, (tokens, pages))| PromptPart {
            slot,
            start: 0,
            tokens,
            pages,
            ends: true,
        })
        .collect();
    let step = engine.start(&parts, &[], Vec::new()).unwrap();
    keep(engine.finish(step).unwrap());
    for step in 0..20 {
        let tokens: Vec<DecodeToken<'_>> = (0..2)
            .map(|slot| DecodeToken {
                slot,
                token: None,
                position: prompts[slot].len() + step,
                pages: &pages[slot],
            })
            .collect();
        let step = engine.start(&[], &tokens, Vec::new()).unwrap();
        keep(engine.finish(step).unwrap());
    }
    outputs
}

#[test]
fn batches_over_pages_have_the_log_probabilities_of_one_device() {
    let config = config_of(Architecture::Qwen3, json!({}));
    let mut rng = rng();
    let [whole, split] = whole_and_split(&config, 2);
    let prompts = [5, 18].map(|length| random_tokens(length, config.vocab_size, &mut rng));
    let [expected, found] = [&whole, &split].map(|model| decode_batch(model, &prompts));
    assert_eq!(expected.len(), found.len());
    for ((token, expected), (found_token, found)) in expected.into_iter().zip(found) {
        assert_eq!(token, found_token);
        let difference = (expected.logprob - found.logprob).abs();
        assert!(difference < LOGPROB_TOLERANCE, "{difference}");
        assert_eq!(expected.top.len(), found.top.len());
        for ((_, expected), (_, found)) in expected.top.iter().zip(&found.top) {
            assert!((expected - found).abs() < LOGPROB_TOLERANCE);
        }
    }
}

#[test]
fn all_ranks_have_the_same_bits_over_many_steps() {
    expect_same_bits(60);
}

#[test]
#[ignore = "slow: `cargo test -p marlin-lm ten_thousand_steps -- --ignored`"]
fn all_ranks_have_the_same_bits_over_ten_thousand_steps() {
    expect_same_bits(10_000);
}

/// Checks that the logits of all ranks are the same bits in every step. The steps are those of 1,
/// 3, 16 and 64 sequences.
fn expect_same_bits(steps: usize) {
    let config = config();
    let [_, split] = whole_and_split(&config, 6);
    let ranks = split.ranks().unwrap();
    let mut rng = rng();
    let (session, own_id) = (ranks.session().unwrap(), ranks.new_id());
    // Each rank keeps the bits of the logits that it computes beside rank 0.
    for (step, sequences) in [1, 3, 16, 64].into_iter().cycle().take(steps).enumerate() {
        let tokens = random_tokens(sequences, config.vocab_size, &mut rng);
        let logits_of = move |model: &Model| {
            let tokens = token_tensor(&tokens, [tokens.len(), 1], &model.device());
            let logits = model.logits(model.hidden(tokens, None));
            let values = logits.try_into_vec_as::<f32>().unwrap();
            values.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        let on_rank = logits_of.clone();
        let command = move |state: &mut RankState| {
            let bits = on_rank(&state.model);
            state.keep(own_id, bits);
        };
        let expected = ranks.run(session, command, || logits_of(&split)).unwrap();
        let read = move |state: &mut RankState| {
            state.kept::<Vec<u32>>(own_id).map(|(_, bits)| bits.clone())
        };
        for bits in ranks.ask(session, read).unwrap() {
            assert_eq!(bits.as_ref(), Some(&expected), "step {step}");
        }
    }
    ranks.forget(own_id);
}

#[test]
fn two_engines_of_one_split_model_run_on_two_threads() {
    let config = config();
    let [whole, split] = whole_and_split(&config, 2);
    let requests = requests(&config);
    let expected = decode(&whole, &requests);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| decode(&split, &requests)))
            .collect();
        for thread in threads {
            let found = thread.join().unwrap();
            expect_same(&whole, &requests, [&expected, &found]);
        }
    });
}

#[test]
fn perplexity_of_a_split_model_is_that_of_one_device() {
    let config = config();
    let [whole, split] = whole_and_split(&config, 2);
    let tokens = random_tokens(200, config.vocab_size, &mut rng());
    let [expected, found] =
        [&whole, &split].map(|model| crate::perplexity(model, &tokens, 32, |_| {}).unwrap());
    assert_eq!(expected.tokens, found.tokens);
    assert!(
        (expected.nll - found.nll).abs() < 1e-5,
        "{found:?}, {expected:?}"
    );
    let evaluations = crate::evaluate(&[&whole, &split], &[&tokens], 32, |_, _| {}).unwrap();
    let against = evaluations.all[1].against.as_ref().unwrap();
    assert!(against.divergence.mean < 1e-6, "{against:?}");
}
