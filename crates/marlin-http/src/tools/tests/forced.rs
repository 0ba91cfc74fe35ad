//! Answers that follow the grammar of a format are calls for its parser.

use std::sync::LazyLock;

use marlin_serve::grammar::{CompilerOptions, Grammar, GrammarCompiler, GrammarSource};
use marlin_testing::{byte_fallback_tokenizer, open_tokenizer};
use marlin_text::Tokenizer;

use super::*;

/// The token that ends a text.
pub(crate) const END: u32 = 0;

/// Returns a tokenizer with single bytes and these special tokens, which it shows, and a compiler of
/// grammars for it.
pub(crate) fn compiler(special: &[&str]) -> (Tokenizer, GrammarCompiler) {
    let json = byte_fallback_tokenizer(&[&["</s>"], special].concat(), []);
    let tokenizer = open_tokenizer(&json, |path| Tokenizer::open(path).unwrap());
    let tokenizer = tokenizer.showing(special).unwrap();
    let (size, options) = (tokenizer.vocab_size(), CompilerOptions::default());
    let compiler = GrammarCompiler::new(tokenizer.clone(), size, vec![END], options);
    (tokenizer, compiler)
}

/// Returns two tools: `digit`, with an argument `n` from 0 to 9, and `no.thing-1`, without any.
pub(crate) fn tools() -> [ToolSchema<'static>; 2] {
    static DIGIT: LazyLock<Value> = LazyLock::new(|| {
        json!({
            "properties": { "n": { "$ref": "#/$defs/digit" } },
            "required": ["n"],
            "additionalProperties": false,
            "$defs": { "digit": { "type": "integer", "minimum": 0, "maximum": 9 } },
        })
    });
    [("digit", Some(&*DIGIT)), ("no.thing-1", None)]
        .map(|(name, parameters)| ToolSchema { name, parameters })
}

/// Checks that a call is one of [`tools`].
#[track_caller]
pub(crate) fn check_call(name: &str, arguments: &str) {
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    let count = arguments.as_object().map(|arguments| arguments.len());
    match name {
        "digit" => assert!(count == Some(1) && arguments["n"].is_u64(), "{arguments}"),
        "no.thing-1" => assert_eq!(count, Some(0), "{arguments}"),
        _ => panic!("{name}: {arguments}"),
    }
}

/// Returns a random text that a grammar allows.
pub(crate) fn written(grammar: &Grammar, tokenizer: &Tokenizer, rng: &mut StdRng) -> String {
    let mut state = grammar.start();
    let mut tokens = Vec::new();
    while !state.is_stopped() {
        let mask = state.mask().unwrap();
        let allowed: Vec<u32> = (0..tokenizer.vocab_size() as u32)
            .filter(|token| mask[*token as usize / 32] >> (token % 32) & 1 == 1)
            .collect();
        let token = allowed[rng.random_range(0..allowed.len())];
        state.accept(token).unwrap();
        tokens.push(token);
        assert!(tokens.len() < 5000);
    }
    tokens.retain(|token| *token != END);
    tokenizer.decode(&tokens).unwrap()
}

/// Random answers are generated under the grammar, with the markers as special tokens and without.
/// Takes 4 s.
#[test]
fn answers_under_a_grammar_are_calls() {
    let mut rng = marlin_testing::rng();
    let tools = tools();
    let no_args = &["[TOOL_CALLS]"][..];
    for (format, special) in [
        (ToolFormat::Hermes, ToolFormat::Hermes.markers()),
        (ToolFormat::Hermes, &[]),
        (ToolFormat::Llama3Json, ToolFormat::Llama3Json.markers()),
        (ToolFormat::Mistral, ToolFormat::Mistral.markers()),
        (ToolFormat::Mistral, no_args),
        (ToolFormat::Mistral, &[]),
        (ToolFormat::Qwen3Coder, ToolFormat::Qwen3Coder.markers()),
        (ToolFormat::Qwen3Coder, &[]),
        (ToolFormat::SeedOss, ToolFormat::SeedOss.markers()),
    ] {
        let (tokenizer, compiler) = compiler(special);
        for several in [false, true] {
            let token_id = |text: &str| compiler.token_id(text).unwrap();
            let text = format.grammar(&tools, several, token_id).unwrap();
            let grammar = compiler.compile(&GrammarSource::Lark(text)).unwrap();
            let mut most = 0;
            for _ in 0..20 {
                let text = written(&grammar, &tokenizer, &mut rng);
                let (content, calls) = collect(parsed(format, [text.as_str()]));
                assert_eq!(content, "", "{text}");
                assert!(calls.len() == 1 || (several && !calls.is_empty()), "{text}");
                most = most.max(calls.len());
                for ToolCall { name, arguments } in calls {
                    check_call(&name, &arguments);
                }
            }
            // Of 20 answers, one has several calls, or something is very wrong.
            assert!(most > 1 || !several || format == ToolFormat::Llama3Json);
        }
    }
}
