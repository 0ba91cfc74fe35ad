//! What ends a text, and what is in it.

use crate::model::{EOS, continuation};
use crate::support::{Answer, Fixture, greedy, prompt, tokenizer};
use futures_lite::{StreamExt, future::block_on};
use marlin_serve::server::{
    EndReason, GenerationRequest, ParamError, SamplingParams, SubmitError, TokenEvent, Usage,
};
use std::collections::BTreeMap;

/// The text of tokens is cut before each string of one to four characters in it: about 800
/// requests, in about 0.3 s.
#[test]
fn a_stop_string_ends_the_text_wherever_it_lies_among_the_tokens() {
    let mut rng = marlin_testing::rng();
    let fixture = Fixture::new(|_| {});
    let tokenizer = tokenizer();
    let prompts = (0..1000).map(|_| prompt(&mut rng, 5));
    let text = |prompt: &Vec<u32>| continuation(prompt, 0.0, 0, 0, 150);
    let (prompt, tokens) = prompts
        .map(|prompt| (text(&prompt), prompt))
        .find(|(tokens, _)| tokens.len() == 150)
        .map(|(tokens, prompt)| (prompt, tokens))
        .expect("a long text");
    let text = fixture.run(greedy(prompt.clone(), 150)).text;
    assert_eq!(text, tokenizer.decode(&tokens).unwrap());
    let characters: Vec<_> = text.chars().collect();
    assert!(characters.iter().any(|char| char.len_utf8() == 4), "{text}");
    let mut cases = Vec::new();
    for len in 1..=4 {
        for part in characters.windows(len) {
            let part: String = part.iter().collect();
            // A second string that begins like the first one, and is not complete.
            let longer = format!("{part}\u{0}");
            let request = GenerationRequest {
                stop: vec![longer, part.clone()],
                ..greedy(prompt.clone(), 150)
            };
            cases.push((part, request));
        }
    }
    for cases in cases.chunks(256) {
        let streams = cases
            .iter()
            .map(|(_, request)| fixture.submit(request.clone()));
        let streams: Vec<_> = streams.collect();
        for ((stop, _), stream) in cases.iter().zip(streams) {
            let answer = Answer::read(stream);
            let at = text.find(stop.as_str()).unwrap();
            assert_eq!(answer.text, text[..at], "before {stop:?} of {text:?}");
            assert_eq!(answer.end, Ok(EndReason::StopString(stop.clone())));
            let length = |tokens: &[u32]| tokenizer.decode(tokens).unwrap().len();
            assert_eq!(
                length(&answer.tokens),
                at + stop.len(),
                "the last token is the stop's"
            );
        }
    }
}

#[test]
fn what_may_become_a_stop_string_is_held_back_until_the_end() {
    let fixture = Fixture::new(|_| {});
    let prompt = vec![97; 6];
    let whole = fixture.run(greedy(prompt.clone(), 20));
    let characters: Vec<_> = whole.text.chars().collect();
    let end: String = characters[characters.len() - 3..].iter().collect();
    let request = GenerationRequest {
        stop: vec![format!("{end}\u{0}"), whole.text.clone() + "\u{0}"],
        ..greedy(prompt, 20)
    };
    let mut stream = fixture.submit(request);
    let mut texts = Vec::new();
    while let Some(TokenEvent::Token { text, .. }) = block_on(stream.next()) {
        texts.push(text);
    }
    let (last, before) = texts.split_last().unwrap();
    assert!(before.iter().all(String::is_empty), "{texts:?}");
    assert_eq!(last, &whole.text);
}

#[test]
fn tokens_end_a_text_as_they_are_asked_to() {
    let mut rng = marlin_testing::rng();
    let fixture = Fixture::new(|_| {});
    let (prompt, tokens) = (0..1000)
        .map(|_| prompt(&mut rng, 9))
        .map(|prompt| (continuation(&prompt, 0.0, 0, 0, 100), prompt))
        .find(|(tokens, _)| tokens.last() == Some(&EOS) && (20..90).contains(&tokens.len()))
        .map(|(tokens, prompt)| (prompt, tokens))
        .unwrap();
    let request = greedy(prompt.clone(), 100);
    let answer = fixture.run(request.clone());
    assert_eq!(
        (answer.end, &answer.tokens),
        (Ok(EndReason::EndOfSequence), &tokens)
    );
    let usage = Usage {
        prompt_tokens: 9,
        cached_tokens: 0,
        completion_tokens: tokens.len(),
    };
    assert_eq!(answer.usage, usage);
    // The prompt has two whole pages.
    assert_eq!(fixture.run(request.clone()).usage.cached_tokens, 8);

    let ignoring = GenerationRequest {
        ignore_eos: true,
        ..request.clone()
    };
    let answer = fixture.run(ignoring);
    assert_eq!(
        (answer.end, answer.tokens.len()),
        (Ok(EndReason::Length), 100)
    );
    assert_eq!(answer.tokens[..tokens.len()], tokens);

    let both = GenerationRequest {
        stop_token_ids: vec![EOS],
        ..request.clone()
    };
    assert_eq!(fixture.run(both).end, Ok(EndReason::EndOfSequence));

    let stop = tokens[12];
    let first = tokens.iter().position(|&token| token == stop).unwrap();
    let stopping = GenerationRequest {
        stop_token_ids: vec![stop],
        ..request.clone()
    };
    let answer = fixture.run(stopping);
    assert_eq!(answer.end, Ok(EndReason::StopToken(stop)));
    assert_eq!(answer.tokens, tokens[..=first]);
    assert_eq!(answer.text, tokenizer().decode(&tokens[..first]).unwrap());

    let mut longer = request.clone();
    longer.sampling.min_tokens = tokens.len() + 5;
    longer.stop = vec![
        "a".into(),
        "b".into(),
        "c".into(),
        " ".into(),
        ".".into(),
        "€".into(),
    ];
    let answer = fixture.run(longer);
    assert!(answer.tokens.len() > tokens.len() + 5, "{answer:?}");
    let kept = tokenizer()
        .decode(&answer.tokens[..tokens.len() + 5])
        .unwrap();
    assert!(answer.text.starts_with(kept.trim_end_matches('\u{fffd}')));

    let one = fixture.run(greedy(prompt, 1));
    assert_eq!(
        (one.end, one.tokens),
        (Ok(EndReason::Length), tokens[..1].to_vec())
    );
}

#[test]
fn the_seed_of_a_request_counts_if_it_has_a_temperature() {
    let fixture = Fixture::new(|_| {});
    let tokens = |temperature, seed| {
        let mut request = greedy(vec![8; 5], 30);
        request.ignore_eos = true;
        request.sampling.temperature = temperature;
        request.sampling.seed = seed;
        fixture.run(request).tokens
    };
    assert_eq!(tokens(1.0, Some(3)), tokens(1.0, Some(3)));
    assert_ne!(tokens(1.0, Some(3)), tokens(1.0, Some(4)));
    assert_ne!(
        tokens(1.0, None),
        tokens(1.0, None),
        "each gets a random seed"
    );
    assert_eq!(tokens(0.0, None), tokens(0.0, None));
}

#[test]
fn log_probabilities_come_with_their_tokens() {
    let fixture = Fixture::new(|_| {});
    let mut request = greedy(vec![5; 3], 4);
    request.sampling.logprobs = Some(1);
    let mut stream = fixture.submit(request);
    let mut count = 0;
    while let Some(event) = block_on(stream.next()) {
        if let TokenEvent::Token {
            token, logprobs, ..
        } = event
        {
            assert_eq!(logprobs.unwrap().top, [(token, -1.0)]);
            count += 1;
        }
    }
    assert_eq!(count, 4);
}

#[test]
fn a_request_without_a_limit_fills_the_window_or_the_cache() {
    let request = GenerationRequest {
        max_tokens: None,
        ignore_eos: true,
        ..greedy(vec![3; 10], 1)
    };
    let fixture = Fixture::new(|options| options.scheduler.pages = 20);
    assert_eq!(fixture.handle.max_len(), 81);
    let answer = fixture.run(request.clone());
    assert_eq!(
        (answer.end, answer.tokens.len()),
        (Ok(EndReason::Length), 71)
    );
    let fixture = Fixture::new(|_| {});
    assert_eq!(fixture.handle.max_len(), 4096);
    assert_eq!(fixture.run(request).tokens.len(), 4086);
}

#[test]
fn what_cannot_run_is_refused_with_its_numbers() {
    let fixture = Fixture::new(|options| options.scheduler.pages = 20);
    let refusal = |change: &dyn Fn(&mut GenerationRequest)| {
        let mut request = greedy(vec![1; 10], 10);
        change(&mut request);
        fixture.handle.submit(request).expect_err("it is refused")
    };
    let message = |change: &dyn Fn(&mut GenerationRequest)| refusal(change).to_string();
    assert_eq!(refusal(&|r| r.prompt.clear()), SubmitError::EmptyPrompt);
    assert_eq!(
        message(&|r| r.max_tokens = Some(72)),
        "a prompt of 10 tokens and up to 72 new ones do not fit in the KV cache, which has room for \
         81; shorten the prompt, ask for fewer tokens, or give the server a larger KV cache"
    );
    assert_eq!(
        refusal(&|r| r.max_tokens = Some(usize::MAX)),
        SubmitError::ContextLength {
            prompt: 10,
            max_tokens: usize::MAX,
            window: 4096
        }
    );
    let full = |r: &mut GenerationRequest| (r.prompt, r.max_tokens) = (vec![1; 5000], None);
    assert!(message(&full).starts_with("a prompt of 5000 tokens and up to 1 new ones are longer"));
    assert_eq!(
        message(&|r| r.max_tokens = Some(0)),
        "max_tokens is 0; it must be at least 1"
    );
    type Change<T> = fn(&mut T);
    let cases: [(&str, Change<GenerationRequest>); 21] = [
        ("prompt is token 258;", |r| r.prompt[3] = 258),
        ("stop_token_ids is token 300;", |r| {
            r.stop_token_ids = vec![300]
        }),
        ("stop is 65 strings;", |r| r.stop = vec!["a".into(); 65]),
        ("stop is a string of 0 bytes;", |r| {
            r.stop = vec![String::new()]
        }),
        ("stop is a string of 1025 bytes;", |r| {
            r.stop = vec!["a".repeat(1025)]
        }),
        ("min_tokens is 11;", |r| r.sampling.min_tokens = 11),
        ("temperature is -0.1;", |r| r.sampling.temperature = -0.1),
        ("temperature is NaN;", |r| r.sampling.temperature = f32::NAN),
        ("temperature is inf;", |r| {
            r.sampling.temperature = f32::INFINITY
        }),
        ("top_p is 0;", |r| r.sampling.top_p = 0.0),
        ("top_p is 1.1;", |r| r.sampling.top_p = 1.1),
        ("min_p is NaN;", |r| r.sampling.min_p = f32::NAN),
        ("top_k is 0;", |r| r.sampling.top_k = Some(0)),
        ("repetition_penalty is 0;", |r| {
            r.sampling.repetition_penalty = 0.0
        }),
        ("presence_penalty is 2.5;", |r| {
            r.sampling.presence_penalty = 2.5
        }),
        ("frequency_penalty is -3;", |r| {
            r.sampling.frequency_penalty = -3.0
        }),
        ("logit_bias is 101 for token 3;", |r| {
            r.sampling.logit_bias = BTreeMap::from([(3, 101.0)]);
        }),
        ("logit_bias is token 999;", |r| {
            r.sampling.logit_bias = BTreeMap::from([(999, 1.0)]);
        }),
        ("suppress_tokens is token 258;", |r| {
            r.sampling.suppress_tokens = vec![258]
        }),
        ("bad_words_ids is a list", |r| {
            r.sampling.bad_words_ids = vec![vec![]]
        }),
        ("logprobs is 2; it must be at most 1", |r| {
            r.sampling.logprobs = Some(2)
        }),
    ];
    for (expected, change) in cases {
        let message = message(&change);
        assert!(message.starts_with(expected), "{message}, not {expected}");
    }
    let unsupported: [(&str, Change<SamplingParams>); 3] = [
        ("presence_penalty", |params| params.presence_penalty = 1.0),
        ("frequency_penalty", |params| params.frequency_penalty = 1.0),
        ("logit_bias", |params| {
            params.logit_bias = BTreeMap::from([(3, 1.0)])
        }),
    ];
    for (param, change) in unsupported {
        let error = refusal(&|request| change(&mut request.sampling));
        assert_eq!(error, SubmitError::Param(ParamError::Unsupported { param }));
    }
}
