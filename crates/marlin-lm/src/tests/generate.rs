//! Tests of text generation on random models with a byte-level tokenizer.

use std::ops::ControlFlow;
use std::sync::Arc;

use burn::tensor::Device;
use marlin_format::checkpoint::Dtype;
use serde_json::json;

use super::support::*;
use crate::tokens::token_tensor;
use crate::{
    GenerateOptions, LanguageModel, ModelError, OpenOptions, Sampling, SamplingError, StopReason,
    Suppression,
};

const CONTINUE: ControlFlow<()> = ControlFlow::Continue(());

/// Opens a random model whose KV cache has `max_len` positions.
fn llama(max_len: usize) -> LanguageModel {
    let config = config_with(json!({ "vocab_size": 260, "eos_token_id": 257 }));
    let (_parent, dir) = temporary();
    write_folder(
        &dir,
        &config,
        &random_weights(&config, &mut rng()),
        Dtype::F32,
    );
    std::fs::write(
        dir.join("tokenizer.json"),
        byte_level_tokenizer().to_string(),
    )
    .unwrap();
    LanguageModel::open(
        &dir,
        &Device::flex(),
        &OpenOptions {
            max_len: Some(max_len),
            with_tokenizer: true,
            ..options()
        },
    )
    .unwrap()
}

fn options_for(max_new_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_new_tokens,
        sampling: Sampling::GREEDY,
        suppression: Suppression::NONE,
        stop_tokens: vec![],
        seed: 1,
        warm_up: true,
        compile_ahead: true,
        answer: false,
    }
}

#[test]
fn greedy_generation_takes_the_most_likely_token_of_the_full_pass() {
    let llama = llama(96);
    let mut pieces = String::new();
    let generation = llama
        .generate("Hi, Bären", &options_for(12), |text| {
            pieces.push_str(text);
            CONTINUE
        })
        .unwrap();
    let mut tokens = llama.tokenizer().unwrap().encode("Hi, Bären").unwrap();
    assert_eq!(
        (tokens[0], tokens.len(), generation.prompt_tokens),
        (256, 11, 11)
    );
    for &token in &generation.tokens {
        let logits =
            llama
                .model
                .forward_full(token_tensor(&tokens, [1, tokens.len()], &Device::flex()));
        let logits = logits.try_into_vec_as::<f32>().unwrap();
        let last = &logits[(tokens.len() - 1) * 260..];
        let best = (0..260)
            .max_by(|&a, &b| last[a].total_cmp(&last[b]))
            .unwrap();
        assert!(
            last[best] - last[token as usize] < 1e-4,
            "token {token} instead of {best} after {tokens:?}"
        );
        tokens.push(token);
    }
    assert_eq!(
        (generation.tokens.len(), generation.stop_reason),
        (12, StopReason::MaxNewTokens)
    );
    assert_eq!(generation.text, pieces);
    assert!(
        generation.prefill > std::time::Duration::ZERO
            && generation.decode > std::time::Duration::ZERO
    );
}

#[test]
fn the_seed_decides_what_is_sampled() {
    let llama = llama(96);
    let sampling = Sampling {
        temperature: 1.0,
        ..Sampling::GREEDY
    };
    let run = |seed| {
        llama
            .generate(
                "a",
                &GenerateOptions {
                    sampling,
                    seed,
                    ..options_for(20)
                },
                |_| CONTINUE,
            )
            .unwrap()
            .tokens
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

#[test]
fn it_stops_at_stop_tokens_the_limit_and_the_end_of_the_cache() {
    let llama = llama(20);
    let first = llama
        .generate("abc", &options_for(3), |_| CONTINUE)
        .unwrap();
    let stop = first.tokens[2];
    let position = first
        .tokens
        .iter()
        .position(|&token| token == stop)
        .unwrap();
    let stopped = llama
        .generate(
            "abc",
            &GenerateOptions {
                stop_tokens: vec![stop],
                ..options_for(3)
            },
            |_| CONTINUE,
        )
        .unwrap();
    assert_eq!(
        (stopped.tokens, stopped.stop_reason),
        (
            first.tokens[..position].to_vec(),
            StopReason::StopToken(stop)
        )
    );

    // 4 prompt tokens fill 4 of 20 positions. The 17th new token is chosen from the logits of the
    // last position, and is not in the KV cache.
    let full = llama
        .generate("abc", &options_for(100), |_| CONTINUE)
        .unwrap();
    assert_eq!(
        (full.tokens.len(), full.stop_reason),
        (17, StopReason::CacheFull)
    );
    let exact = llama
        .generate("abc", &options_for(17), |_| CONTINUE)
        .unwrap();
    assert_eq!(
        (exact.tokens, exact.stop_reason),
        (full.tokens, StopReason::MaxNewTokens)
    );
    let none = llama
        .generate("abc", &options_for(0), |_| panic!("no text"))
        .unwrap();
    assert_eq!(
        (none.tokens.len(), none.stop_reason),
        (0, StopReason::MaxNewTokens)
    );
    assert_eq!(llama.default_options(5).stop_tokens, [257]);
}

#[test]
fn the_caller_can_stop_it() {
    let llama = llama(96);
    let whole = llama
        .generate("abc", &options_for(40), |_| CONTINUE)
        .unwrap();
    let mut pieces = Vec::new();
    let stopped = llama
        .generate("abc", &options_for(40), |text| {
            pieces.push(text.to_owned());
            if pieces.len() == 3 {
                ControlFlow::Break(())
            } else {
                CONTINUE
            }
        })
        .unwrap();
    assert_eq!(
        (pieces.len(), stopped.stop_reason),
        (3, StopReason::Stopped)
    );
    assert_eq!(stopped.text, pieces.concat());
    assert!(
        stopped.tokens.len() < 40 && whole.tokens.starts_with(&stopped.tokens),
        "{stopped:?}"
    );
    // If the caller stops at the last piece, the text is complete.
    let mut left = whole.text.len();
    let last = llama.generate("abc", &options_for(40), |text| {
        left -= text.len();
        if left == 0 {
            ControlFlow::Break(())
        } else {
            CONTINUE
        }
    });
    let last = last.unwrap();
    assert_eq!(
        (&last.text, last.stop_reason),
        (&whole.text, StopReason::Stopped)
    );
}

#[test]
fn prompts_that_cannot_be_continued_are_refused() {
    let llama = llama(20);
    let error = llama
        .generate(&"x".repeat(20), &options_for(1), |_| CONTINUE)
        .expect_err("21 tokens");
    assert!(matches!(
        error,
        ModelError::PromptTooLong {
            tokens: 21,
            max: 20
        }
    ));
    assert!(error.to_string().contains("21") && error.to_string().contains("20"));
    assert_eq!(
        llama
            .generate(&"x".repeat(19), &options_for(5), |_| CONTINUE)
            .unwrap()
            .tokens
            .len(),
        1
    );

    let options = GenerateOptions {
        sampling: Sampling {
            top_p: 2.0,
            ..Sampling::GREEDY
        },
        ..options_for(1)
    };
    let error = llama
        .generate("x", &options, |_| CONTINUE)
        .expect_err("top_p");
    assert!(matches!(
        error,
        ModelError::Sampling(SamplingError::Option {
            option: "top_p",
            ..
        })
    ));

    // If the tokenizer adds no token at the start of a text, an empty prompt has no tokens.
    let mut tokenizer = byte_level_tokenizer();
    tokenizer["post_processor"] = serde_json::Value::Null;
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let llama = LanguageModel {
        tokenizer: Some(crate::Tokenizer::open(&path).unwrap()),
        ..llama
    };
    assert!(matches!(
        llama.generate("", &options_for(1), |_| CONTINUE),
        Err(ModelError::EmptyPrompt)
    ));
    let llama = LanguageModel {
        tokenizer: None,
        ..llama
    };
    assert!(matches!(
        llama.generate("x", &options_for(1), |_| CONTINUE),
        Err(ModelError::NoTokenizer)
    ));
}

#[test]
fn broken_weights_are_an_error_and_no_text() {
    let mut llama = llama(20);
    let norm = llama.model.norm.weight.val();
    Arc::make_mut(&mut llama.model).norm.weight =
        crate::model::loaded(norm.slice_fill(0..1, f32::NAN));
    let error = llama
        .generate("x", &options_for(1), |_| CONTINUE)
        .expect_err("NaN");
    assert!(matches!(
        error,
        ModelError::Sampling(SamplingError::NoToken)
    ));
}

#[test]
fn an_answer_is_a_text_by_itself() {
    let llama = llama(20);
    let text = llama
        .generate("abc", &options_for(6), |_| CONTINUE)
        .unwrap()
        .text;
    // A tokenizer that removes the first character of a text, as SentencePiece tokenizers remove a
    // leading space.
    let mut tokenizer = byte_level_tokenizer();
    let first = text.chars().next().unwrap();
    tokenizer["decoder"] = json!({ "type": "Sequence", "decoders": [tokenizer["decoder"], { "type": "Strip", "content": first, "start": 1, "stop": 0 }] });
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let llama = LanguageModel {
        tokenizer: Some(crate::Tokenizer::open(&path).unwrap()),
        ..llama
    };
    let generate = |answer| {
        llama
            .generate(
                "abc",
                &GenerateOptions {
                    answer,
                    ..options_for(6)
                },
                |_| CONTINUE,
            )
            .unwrap()
    };
    assert_eq!(generate(false).text, text);
    let answer = generate(true);
    assert_eq!(answer.text, text[first.len_utf8()..]);
    assert_eq!(
        answer.text,
        llama.tokenizer().unwrap().decode(&answer.tokens).unwrap()
    );
}
