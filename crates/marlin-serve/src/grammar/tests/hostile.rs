//! Grammars that are made to harm.

use super::*;

/// Takes 4 s. Without optimisation, `llguidance` is ten times slower than in a program.
#[test]
fn grammars_that_cannot_be_used_are_refused_in_bounded_time() {
    let options = CompilerOptions {
        time_limit: Duration::from_secs(60),
        ..CompilerOptions::default()
    };
    let vocabulary = Vocabulary::of([], options);
    let explodes = |n: usize| {
        let part = |i| {
            let [a, b] = ["a", "b"].map(|name| {
                let integer = json!({ format!("{name}{i}"): { "type": "integer" } });
                json!({ "properties": integer, "type": "object" })
            });
            json!({ "anyOf": [a, b] })
        };
        schema(json!({ "allOf": (0..n).map(part).collect::<Vec<_>>() }))
    };
    let refused = [
        (GrammarSource::Regex("(".into()), "unclosed group"),
        (GrammarSource::Regex("(".repeat(20_000)), "invalid regex"),
        (lark("start: other"), "unknown name"),
        (
            lark(format!("start: {}", "(".repeat(20_000))),
            "too deeply nested",
        ),
        (
            schema(json!({ "type": "object", "if": {} })),
            "Unimplemented keys",
        ),
        (
            schema(json!({ "$ref": "https://example.com/x" })),
            "example.com",
        ),
        (schema(json!([])), "must be an object"),
        (
            schema(json!({ "multipleOf": 1009, "allOf": [{ "multipleOf": 99.7 }] })),
            "`multipleOf`",
        ),
        (
            lark("start: %json {\"multipleOf\": 7} | %json {\"multipleOf\": 100003}"),
            "`multipleOf`",
        ),
        (explodes(20), "too large"),
    ];
    for (source, expected) in refused {
        let start = Instant::now();
        let error = vocabulary.compiler.compile(&source).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(expected) && text.len() < 600, "{text}");
        assert!(matches!(error, GrammarError::Refused(_)) && error.is_of_grammar());
        println!("{:.0?}: {text}", start.elapsed());
    }
    let empty = [
        lark("start: A\nA: /a/ & /b/"),
        lark("start: a\na: b\nb: a"),
        schema(json!({ "allOf": [{ "$ref": "#" }] })),
        schema(json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/a" } } })),
    ];
    for source in empty {
        let error = vocabulary.compiler.compile(&source).unwrap_err();
        assert!(matches!(error, GrammarError::Empty), "{error}");
    }
    let long = GrammarSource::Regex("a".repeat(MAX_GRAMMAR_BYTES + 1));
    let error = vocabulary.compiler.compile(&long).unwrap_err();
    assert!(matches!(error, GrammarError::TooLong { bytes } if bytes == MAX_GRAMMAR_BYTES + 1));
    let error = vocabulary
        .compiler
        .compile(&GrammarSource::JsonSchema("{".into()));
    assert!(matches!(error, Err(GrammarError::Json(_))));
}

/// Returns a chain of this many rules, and a chain of references with a quarter as many.
fn deep(levels: usize) -> [GrammarSource; 2] {
    let rule = |level| format!("a{level}: a{} \"x\"\n", level + 1);
    let rules: String = (0..levels).map(rule).collect();
    let chain = lark(format!("start: a0\n{rules}a{levels}: \"y\""));
    let levels = levels / 4;
    let level = |level: usize| {
        let next = json!({ "a": { "$ref": format!("#/$defs/{}", level + 1) } });
        let value = json!({ "type": "object", "properties": next });
        (level.to_string(), value)
    };
    let mut definitions: serde_json::Map<_, _> = (0..levels).map(level).collect();
    definitions.insert(levels.to_string(), json!(true));
    let references = schema(json!({ "$ref": "#/$defs/0", "$defs": definitions }));
    [chain, references]
}

/// Compiles deep grammars, and takes a mask on the stack of the caller, here of 2 MiB.
fn check_deep(levels: usize) {
    let options = CompilerOptions {
        time_limit: Duration::from_secs(60),
        ..CompilerOptions::default()
    };
    let vocabulary = Vocabulary::of([], options);
    for source in deep(levels) {
        vocabulary.start(&source).mask().unwrap();
    }
}

#[test]
fn deep_grammars_do_not_overflow_a_stack() {
    check_deep(1500);
}

/// Takes 5 s without optimisation.
#[test]
#[ignore = "slow without optimisation"]
fn grammars_as_deep_as_their_length_allows_do_not_overflow_a_stack() {
    let levels = 7400;
    let bytes = deep(levels)[0].text().len();
    assert!(
        (MAX_GRAMMAR_BYTES * 9 / 10..=MAX_GRAMMAR_BYTES).contains(&bytes),
        "{bytes}"
    );
    check_deep(levels);
}

/// Each step of a grammar whose lexer explodes is bounded. Takes 3 s without optimisation.
#[test]
fn a_grammar_that_explodes_ends_its_own_sequence() {
    let vocabulary = Vocabulary::bytes();
    let source = GrammarSource::Regex("(((a{1000}){1000}){1000}){1000}".into());
    let grammar = match vocabulary.compiler.compile(&source) {
        Ok(grammar) => grammar,
        Err(error) => return assert!(error.is_of_grammar(), "{error}"),
    };
    let mut state = grammar.start();
    let start = Instant::now();
    let error = (0..1000).find_map(|_| {
        let step = state.mask().and_then(|_| state.accept(4 + u32::from(b'a')));
        step.err()
    });
    assert!(error.is_none_or(|error| error.is_of_grammar()));
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
}
