use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use marlin_testing::{byte_fallback_tokenizer, open_tokenizer, repository_file, rng};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use super::*;

mod cost;
mod hostile;

/// A compiler, and the bytes of its tokens.
struct Vocabulary {
    compiler: GrammarCompiler,
    tokens: BTreeMap<u32, Vec<u8>>,
    size: usize,
}

/// The token that ends a text in [`Vocabulary::of`]; the one after it does so, too.
const END: u32 = 2;

impl Vocabulary {
    /// Makes a vocabulary of these tokens, single bytes, and special tokens.
    fn of(tokens: impl IntoIterator<Item = String>, options: CompilerOptions) -> Self {
        let special = ["<s>", "<call>", "</s>", "<|end|>"];
        let json = byte_fallback_tokenizer(&special, tokens);
        let size = json["model"]["vocab"].as_object().unwrap().len();
        let tokenizer = open_tokenizer(&json, |path| marlin_text::Tokenizer::open(path).unwrap());
        let tokens = tokenizer.token_bytes().unwrap();
        // The model's vocabulary is larger than the tokenizer's.
        let size = size + 5;
        let compiler = GrammarCompiler::new(tokenizer, size, vec![END, END + 1], options);
        Self {
            compiler,
            tokens,
            size,
        }
    }

    fn bytes() -> Self {
        Self::of([], CompilerOptions::default())
    }

    fn start(&self, source: &GrammarSource) -> GrammarState {
        self.compiler.compile(source).unwrap().start()
    }

    /// Returns the tokens that a state allows.
    fn allowed(&self, state: &mut GrammarState) -> BTreeSet<u32> {
        let mask = state.mask().unwrap();
        assert_eq!(mask.len(), self.size.div_ceil(32));
        (0..mask.len() as u32 * 32)
            .filter(|token| mask[*token as usize / 32] >> (token % 32) & 1 == 1)
            .collect()
    }

    /// Follows a grammar with random tokens until the text ends, and returns the text.
    fn random_text(&self, state: &mut GrammarState, rng: &mut StdRng) -> Vec<u8> {
        let mut text = Vec::new();
        for _ in 0..10_000 {
            let allowed: Vec<u32> = self.allowed(state).into_iter().collect();
            let token = allowed[rng.random_range(0..allowed.len())];
            assert!((token as usize) < self.size - 5, "{token} is no token");
            state.accept(token).unwrap();
            if token == END || token == END + 1 {
                assert!(state.is_stopped());
                return text;
            }
            text.extend(&self.tokens[&token]);
        }
        panic!("the text does not end: {}", String::from_utf8_lossy(&text));
    }
}

fn lark(text: impl Into<String>) -> GrammarSource {
    GrammarSource::Lark(text.into())
}

fn schema(schema: Value) -> GrammarSource {
    GrammarSource::JsonSchema(schema.to_string())
}

/// The mask is compared with the words of a finite language, token by token.
#[test]
fn a_mask_is_the_tokens_with_which_a_match_can_go_on() {
    let mut rng = rng();
    let letters = ["a", "b", "é", "<", ">"];
    let mut word = |longest| -> String {
        (0..rng.random_range(1..=longest))
            .map(|_| letters[rng.random_range(0..letters.len())])
            .collect()
    };
    for _ in 0..20 {
        let tokens: Vec<String> = (0..40).map(|_| word(4)).collect();
        let words: Vec<String> = (0..30).map(|_| word(9)).collect();
        let vocabulary = Vocabulary::of(tokens, CompilerOptions::default());
        let source = GrammarSource::Regex(words.join("|"));
        let mut state = vocabulary.start(&source);
        let mut text = Vec::new();
        loop {
            let goes_on = |more: &[u8]| {
                let start = [&text, more].concat();
                words.iter().any(|word| word.as_bytes().starts_with(&start))
            };
            let mut expected: BTreeSet<u32> = vocabulary
                .tokens
                .iter()
                .filter(|(id, bytes)| **id > END + 1 && goes_on(bytes))
                .map(|(id, _)| *id)
                .collect();
            if words.iter().any(|word| word.as_bytes() == text) {
                expected.extend([END, END + 1]);
            }
            let found = vocabulary.allowed(&mut state);
            assert_eq!(found, expected, "after {text:?} in {words:?}");
            let next = found.iter().nth(text.len() % found.len()).unwrap();
            state.accept(*next).unwrap();
            if *next <= END + 1 {
                break;
            }
            text.extend(&vocabulary.tokens[next]);
        }
        assert!(state.is_stopped());
        assert_eq!(vocabulary.allowed(&mut state), [END, END + 1].into());
    }
}

#[test]
fn texts_follow_a_json_schema() {
    let mut rng = rng();
    let tokens = ["{\"", "\":", "true", "fal", "12", "\": ", " \"", "ame"].map(String::from);
    let vocabulary = Vocabulary::of(tokens, CompilerOptions::default());
    let source = schema(json!({
        "type": "object",
        "properties": {
            "name": { "enum": ["Zoë", "a\"b", null] },
            "count": { "type": "integer", "minimum": -3, "maximum": 120 },
            "list": { "type": "array", "items": { "$ref": "#/$defs/flag" }, "maxItems": 3 },
        },
        "required": ["name", "count", "list"],
        "additionalProperties": false,
        "$defs": { "flag": { "type": "boolean" } },
    }));
    for _ in 0..50 {
        let text = vocabulary.random_text(&mut vocabulary.start(&source), &mut rng);
        let value: Value = serde_json::from_slice(&text).unwrap();
        let object = value.as_object().unwrap();
        assert_eq!(object.len(), 3, "{value}");
        assert!([json!("Zoë"), json!("a\"b"), Value::Null].contains(&value["name"]));
        // `-0` is an integer, too.
        let count = value["count"].as_f64().unwrap();
        assert!((-3.0..=120.0).contains(&count) && count.fract() == 0.0);
        let list = value["list"].as_array().unwrap();
        assert!(list.len() <= 3 && list.iter().all(Value::is_boolean));
    }
    let text = vocabulary.random_text(
        &mut vocabulary.start(&lark("start: /[a-c]{2}/ NUMBER\nNUMBER: /[0-9]+/")),
        &mut rng,
    );
    assert!(text[..2].iter().all(|byte| (b'a'..=b'c').contains(byte)));
    assert!(text[2..].iter().all(u8::is_ascii_digit) && text.len() > 2);
}

/// Special tokens are no text, even where their bytes are allowed.
#[test]
fn special_tokens_are_only_allowed_by_name_or_id() {
    let vocabulary = Vocabulary::bytes();
    let id = vocabulary.compiler.token_id("<call>").unwrap().unwrap();
    assert_eq!(vocabulary.compiler.token_id("<other>").unwrap(), None);
    let mut state = vocabulary.start(&GrammarSource::Regex(".*".into()));
    let allowed = vocabulary.allowed(&mut state);
    assert!(!allowed.contains(&id) && allowed.contains(&(4 + u32::from(b'<'))));
    for source in [
        format!("start: <[{id}]> \"a\""),
        "start: <call> \"a\"".into(),
    ] {
        let mut state = vocabulary.start(&lark(source));
        assert_eq!(vocabulary.allowed(&mut state), [id].into());
        state.accept(id).unwrap();
        assert_eq!(vocabulary.allowed(&mut state), [4 + u32::from(b'a')].into());
    }
}

#[test]
fn a_token_that_is_not_allowed_is_an_error_from_then_on() {
    let vocabulary = Vocabulary::bytes();
    let source = GrammarSource::Regex("ab".into());
    let (mut state, mut other) = (vocabulary.start(&source), vocabulary.start(&source));
    for _ in 0..2 {
        let error = state.accept(4 + u32::from(b'b')).unwrap_err();
        assert!(matches!(error, GrammarError::Stuck(_)), "{error}");
        assert!(error.to_string().len() < 600);
        assert!(matches!(state.mask(), Err(GrammarError::Stuck(_))));
    }
    // Other sequences with the grammar go on.
    other.accept(4 + u32::from(b'a')).unwrap();
    assert!(!other.is_stopped());
    other.accept(4 + u32::from(b'b')).unwrap();
    assert!(other.is_stopped());
}

/// A schema may refer to itself where a value can end.
#[test]
fn recursive_schemas_are_followed() {
    let vocabulary = Vocabulary::bytes();
    let tree = schema(json!({ "type": "array", "items": { "$ref": "#" } }));
    let mut state = vocabulary.start(&tree);
    for byte in b"[[],[[]]]" {
        assert!(!state.is_stopped());
        state.accept(4 + u32::from(*byte)).unwrap();
    }
    assert!(vocabulary.allowed(&mut state).contains(&END));
}

/// A model that prefers whitespace to what a schema asks for comes to the end of it.
#[test]
fn whitespace_between_tokens_of_json_is_bounded() {
    let vocabulary = Vocabulary::bytes();
    let byte = |byte: u8| 4 + u32::from(byte);
    let list = json!({ "type": "array", "items": { "enum": [1] } });
    let own = json!({ "type": "array", "x-guidance": { "whitespace_flexible": false } });
    for (source, most) in [
        (schema(list.clone()), 64),
        (lark(format!("start: \"x\"? a\na: %json {list}")), 64),
        (schema(json!(true)), 64),
        (schema(own), 0),
    ] {
        let mut state = vocabulary.start(&source);
        state.accept(byte(b'[')).unwrap();
        for _ in 0..most {
            state.accept(byte(b" \n\t"[most % 3])).unwrap();
        }
        let allowed = vocabulary.allowed(&mut state);
        assert!(
            b" \n\r\t"
                .iter()
                .all(|space| !allowed.contains(&byte(*space)))
        );
        assert!(allowed.contains(&byte(b']')) && allowed.contains(&byte(b'1')));
    }
}

#[test]
fn reasoning_comes_before_what_a_grammar_allows() {
    let vocabulary = Vocabulary::bytes();
    let call = vocabulary.compiler.token_id("<call>").unwrap();
    let byte = |byte: u8| 4 + u32::from(byte);
    for source in [
        GrammarSource::Regex("/[0-9]{2}".into()),
        lark("start: \"/\" TWO\nTWO: /[0-9]{2}/"),
        schema(json!({ "enum": ["0", "1"] })),
    ] {
        for token in [None, call] {
            let mut state = vocabulary.start(&source.after_reasoning("</think>", token));
            for letter in "12 \"/ </thin\n{é".bytes() {
                state.accept(byte(letter)).unwrap();
            }
            assert!(vocabulary.allowed(&mut state).len() > 100);
            match token {
                Some(token) => state.accept(token).unwrap(),
                None => "</think>"
                    .bytes()
                    .for_each(|letter| state.accept(byte(letter)).unwrap()),
            }
            let first = if matches!(source, GrammarSource::JsonSchema(_)) {
                b'"'
            } else {
                b'/'
            };
            let expected = [byte(first), byte(b'\n')];
            assert_eq!(vocabulary.allowed(&mut state), expected.into());
            for letter in [b'\n', b'\n', first, b'1'] {
                state.accept(byte(letter)).unwrap();
            }
            assert!(!state.is_stopped() && !vocabulary.allowed(&mut state).contains(&END));
            state
                .accept(byte(if first == b'/' { b'2' } else { b'"' }))
                .unwrap();
            assert!(
                vocabulary.allowed(&mut state).contains(&END),
                "{source:?} {token:?}"
            );
        }
    }
}

#[test]
fn compiled_grammars_are_kept_and_compilations_are_limited() {
    let options = CompilerOptions {
        kept: 2,
        ..CompilerOptions::default()
    };
    let vocabulary = Vocabulary::of([], options);
    let compile = |text: &str| {
        vocabulary
            .compiler
            .compile(&GrammarSource::Regex(text.into()))
            .unwrap()
    };
    let first = compile("a");
    compile("b");
    assert!(Arc::ptr_eq(&first, &compile("a")));
    compile("c");
    assert!(Arc::ptr_eq(&first, &compile("a")));
    // `b` is the last used, and `c` was forgotten for it.
    compile("b");
    compile("c");
    assert!(!Arc::ptr_eq(&first, &compile("a")));

    let options = CompilerOptions {
        time_limit: Duration::ZERO,
        max_running: 0,
        ..CompilerOptions::default()
    };
    let source = GrammarSource::Regex("a".into());
    let error = Vocabulary::of([], options.clone())
        .compiler
        .compile(&source);
    assert!(matches!(error, Err(GrammarError::Busy { running: 0 })));
    let options = CompilerOptions {
        max_running: 1,
        ..options
    };
    let vocabulary = Vocabulary::of([], options);
    let error = vocabulary.compiler.compile(&source).unwrap_err();
    assert!(matches!(error, GrammarError::TimeOut { .. }), "{error}");
    // It is kept as soon as it is compiled.
    let start = Instant::now();
    while vocabulary.compiler.compile(&source).is_err() {
        assert!(start.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_model_without_a_stop_token_has_no_grammars() {
    let path = repository_file("examples/train-tiny-llama/model/tokenizer.json");
    let tokenizer = marlin_text::Tokenizer::open(&path).unwrap();
    let size = tokenizer.vocab_size();
    let options = CompilerOptions::default();
    let compiler = GrammarCompiler::new(tokenizer, size, vec![size as u32], options);
    let error = compiler.compile(&GrammarSource::json_object()).unwrap_err();
    assert!(matches!(error, GrammarError::NoStopToken) && !error.is_of_grammar());
}
