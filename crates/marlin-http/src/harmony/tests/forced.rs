//! Answers that follow a grammar of the format.

use marlin_serve::grammar::{Grammar, GrammarSource};
use marlin_text::harmony::MARKERS;

use super::{PROMPT, THOUGHT, divided};
use crate::harmony::{calls_grammar, final_grammar};
use crate::tools::ToolGrammarError;
use crate::tools::tests::forced::{END, check_call, compiler, tools, written};

#[test]
fn answers_under_a_grammar_have_the_form_after_reasoning() {
    let mut rng = marlin_testing::rng();
    let tools = tools();
    let goes_on = format!("{PROMPT}<|channel|>final<|message|>It is ");
    for special in [&MARKERS[..], &[]] {
        let (tokenizer, compiler) = compiler(special);
        let token_id = |text: &str| compiler.token_id(text).unwrap();
        let compile = |prompt: &str| {
            let calls = calls_grammar(prompt, &tools, token_id).unwrap();
            let regex = GrammarSource::Regex("/[0-9]{2}".into());
            let regex = final_grammar(prompt, &regex, token_id);
            [calls, regex].map(|grammar| compiler.compile(&grammar).unwrap())
        };
        let allows = |grammar: &Grammar, text: &str| {
            let mut state = grammar.start();
            let tokens = tokenizer.encode_rendered(text).unwrap();
            let is_allowed = tokens.into_iter().all(|token| state.accept(token).is_ok());
            is_allowed && state.accept(END).is_ok()
        };
        let [calls, regex] = compile(PROMPT);
        for before in ["", THOUGHT] {
            for call in [
                "<|channel|>commentary to=functions.digit <|constrain|>json<|message|>{\"n\": 1}",
                "<|channel|>commentary to=functions.digit<|constrain|>json<|message|>{\"n\":1}",
                " to=functions.no.thing-1<|channel|>commentary json<|message|>{}",
                " to=functions.no.thing-1<|channel|>commentary<|message|>{}",
            ] {
                assert!(allows(&calls, &format!("{before}{call}")), "{before}{call}");
                assert!(!allows(&regex, &format!("{before}{call}")));
            }
            let answer = format!("{before}<|channel|>final<|message|>/12");
            assert!(allows(&regex, &answer) && !allows(&calls, &answer));
        }
        let [calls, regex] = compile(&goes_on);
        let call = " to=functions.no.thing-1<|channel|>commentary<|message|>{}";
        assert!(allows(&calls, &format!("<|end|><|start|>assistant{call}")));
        assert!(allows(&regex, "/12") && !allows(&regex, "<|channel|>final<|message|>/12"));
        if special.is_empty() {
            // A random text does not come to the text of a marker.
            continue;
        }
        let [calls, regex] = compile(PROMPT);
        let mut thoughts = 0;
        for _ in 0..20 {
            let text = written(&calls, &tokenizer, &mut rng);
            let (reasoning, content, found) = divided(PROMPT, true, [text.as_str()]);
            thoughts += usize::from(!reasoning.is_empty());
            assert_eq!(content, "", "{text}");
            let [[name, arguments]] = found.as_slice() else {
                panic!("{text}");
            };
            check_call(name, arguments);
            let text = written(&regex, &tokenizer, &mut rng);
            let (_, content, calls) = divided(PROMPT, true, [text.as_str()]);
            assert!(content.len() == 3 && content.starts_with('/'), "{text}");
            assert!(calls.is_empty());
        }
        assert!(thoughts > 0, "of 20 answers, some have reasoning");
    }
    let none = calls_grammar(PROMPT, &[], |_| None);
    assert_eq!(none, Err(ToolGrammarError::NoTools));
}
