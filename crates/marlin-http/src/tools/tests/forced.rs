//! Answers that follow the grammar of a format are calls for its parser.

use marlin_serve::grammar::{CompilerOptions, Grammar, GrammarCompiler, GrammarSource};
use marlin_text::Tokenizer;

use super::*;

/// The token that ends a text.
pub(crate) const END: u32 = 0;

/// Returns a tokenizer with single bytes and these special tokens.
pub(crate) fn tokenizer(special: &[&str]) -> Tokenizer {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let special = ["</s>"].iter().chain(special);
    let texts: Vec<String> = special
        .clone()
        .map(ToString::to_string)
        .chain(bytes)
        .collect();
    let vocabulary: serde_json::Map<_, _> = (texts.iter().enumerate())
        .map(|(id, text)| (text.clone(), id.into()))
        .collect();
    let added: Vec<Value> = special
        .enumerate()
        .map(|(id, text)| {
            json!({
                "id": id, "content": text, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })
        })
        .collect();
    let json = json!({
        "version": "1.0",
        "added_tokens": added,
        "decoder": { "type": "ByteFallback" },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": true },
    });
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, json.to_string()).unwrap();
    Tokenizer::open(&path).unwrap()
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
/// Takes 2 s.
#[test]
fn answers_under_a_grammar_are_calls() {
    let mut rng = marlin_testing::rng();
    let number = json!({
        "properties": { "n": { "$ref": "#/$defs/digit" } },
        "required": ["n"],
        "additionalProperties": false,
        "$defs": { "digit": { "type": "integer", "minimum": 0, "maximum": 9 } },
    });
    let tools = [
        ToolSchema {
            name: "digit",
            parameters: Some(&number),
        },
        ToolSchema {
            name: "no.thing-1",
            parameters: None,
        },
    ];
    let no_args = &["[TOOL_CALLS]"][..];
    for (format, special) in [
        (ToolFormat::Hermes, ToolFormat::Hermes.markers()),
        (ToolFormat::Hermes, &[]),
        (ToolFormat::Llama3Json, ToolFormat::Llama3Json.markers()),
        (ToolFormat::Mistral, ToolFormat::Mistral.markers()),
        (ToolFormat::Mistral, no_args),
        (ToolFormat::Mistral, &[]),
    ] {
        let tokenizer = tokenizer(special).showing(special).unwrap();
        let size = tokenizer.vocab_size();
        let options = CompilerOptions::default();
        let compiler = GrammarCompiler::new(tokenizer.clone(), size, vec![END], options);
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
                    let arguments: Value = serde_json::from_str(&arguments).unwrap();
                    let arguments = arguments.as_object().unwrap();
                    match name.as_str() {
                        "digit" => assert!(arguments.len() == 1 && arguments["n"].is_number()),
                        "no.thing-1" => assert!(arguments.is_empty()),
                        _ => panic!("{text}"),
                    }
                }
            }
            // Of 20 answers, one has several calls, or something is very wrong.
            assert!(most > 1 || !several || format == ToolFormat::Llama3Json);
        }
    }
}
