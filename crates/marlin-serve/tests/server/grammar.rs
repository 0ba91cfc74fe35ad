//! Texts that follow grammars.

use crate::model::{EOS, VOCAB_SIZE};
use crate::support::{Answer, Fixture, greedy, tokenizer};
use marlin_serve::grammar::{CompilerOptions, GrammarCompiler, GrammarSource};
use marlin_serve::server::{EndReason, GenerationRequest};

/// Requests with and without a grammar, in the same steps. The grammar's mask depends on the token
/// before.
#[test]
fn texts_follow_their_grammars_beside_others() {
    let options = CompilerOptions::default();
    let compiler = GrammarCompiler::new(tokenizer(), VOCAB_SIZE, vec![EOS], options);
    let date = GrammarSource::Regex(r"[0-9]{4}-(0[1-9]|1[0-2])-[0-9]{2}".into());
    let date = compiler.compile(&date).unwrap();
    for runs_ahead in [true, false] {
        // Few pages, so that sequences with a grammar are pre-empted, too.
        let fixture = Fixture::with_model(runs_ahead, |options| options.scheduler.pages = 40);
        let streams: Vec<_> = (0..40)
            .map(|n| {
                let request = GenerationRequest {
                    grammar: (n % 2 == 0).then(|| date.clone()),
                    ..greedy(vec![n + 1; 5], 40)
                };
                fixture.submit(request)
            })
            .collect();
        for (n, stream) in streams.into_iter().enumerate() {
            let answer = Answer::read(stream);
            if n % 2 == 0 {
                assert_eq!(answer.end, Ok(EndReason::Grammar), "{answer:?}");
                let parts: Vec<_> = answer.text.split('-').collect();
                let lens: Vec<_> = parts.iter().map(|part| part.len()).collect();
                assert_eq!(lens, [4, 2, 2], "{}", answer.text);
                let month: u32 = parts[1].parse().unwrap();
                assert!((1..=12).contains(&month), "{}", answer.text);
                assert_eq!(answer.tokens.len(), 10);
            } else {
                let tokens = crate::model::continuation(&[n as u32 + 1; 5], 0.0, 0, 0, 40);
                assert_eq!(answer.tokens, tokens);
            }
        }
        let metrics = fixture.idle(40);
        assert!(metrics.preemptions > 0, "no request was pre-empted");
        assert!(fixture.control.state().masks >= 200);
    }
}

#[test]
fn a_stop_string_or_the_length_ends_a_text_before_its_grammar_does() {
    let options = CompilerOptions::default();
    let compiler = GrammarCompiler::new(tokenizer(), VOCAB_SIZE, vec![EOS], options);
    let grammar = compiler
        .compile(&GrammarSource::Regex("x{5}yz".into()))
        .unwrap();
    let fixture = Fixture::new(|_| {});
    let request = GenerationRequest {
        grammar: Some(grammar),
        ..greedy(vec![6; 5], 20)
    };
    let whole = fixture.run(request.clone());
    assert_eq!(
        (whole.end, &whole.text[..]),
        (Ok(EndReason::Grammar), "xxxxxyz")
    );
    let stopped = fixture.run(GenerationRequest {
        stop: vec!["xy".into()],
        ..request.clone()
    });
    assert_eq!(
        (stopped.end, &stopped.text[..]),
        (Ok(EndReason::StopString("xy".into())), "xxxx")
    );
    let short = fixture.run(GenerationRequest {
        max_tokens: Some(3),
        ..request
    });
    assert_eq!((short.end, &short.text[..]), (Ok(EndReason::Length), "xxx"));
}
