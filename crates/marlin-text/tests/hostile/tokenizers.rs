//! Files `tokenizer.json` that are invalid, expensive or large.

use std::fs;
use std::path::Path;

use libtest_mimic::{Failed, Trial};
use marlin_text::{TextError, Tokenizer};
use serde_json::{Value, json};

use crate::support::{Expected, trial};

/// Returns a tokenizer with one token for each byte.
pub fn byte_level() -> Value {
    serde_json::from_str(include_str!("../byte_level.json")).expect("valid JSON")
}

/// Writes a file and opens it as a tokenizer, then encodes a text and decodes its tokens.
pub fn round_trip(text: &[u8]) -> Result<(), TextError> {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("tokenizer.json");
    fs::write(&path, text).expect("a temporary file can be written");
    let tokenizer = Tokenizer::open(&path)?;
    let tokens = tokenizer.encode("Hello, aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!")?;
    tokenizer.decode(&tokens).map(drop)
}

fn with(field: &str, value: Value) -> Vec<u8> {
    let mut json = byte_level();
    json[field] = value;
    json.to_string().into_bytes()
}

/// Returns the byte-level tokenizer with `value`, which need not be valid JSON, as a field.
fn with_text(field: &str, value: &str) -> Vec<u8> {
    String::from_utf8_lossy(&with(field, "@".into()))
        .replace("\"@\"", value)
        .into_bytes()
}

fn replace(pattern: Value, content: &str) -> Value {
    json!({ "type": "Replace", "pattern": pattern, "content": content })
}

pub fn tests() -> Vec<Trial> {
    use Expected::{Bound, Panicked, Refused, Survived};
    let doubling = |times: usize| vec![replace(json!({ "String": "a" }), "aa"); times];
    let post_processor = json!({
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "<none>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [],
        "special_tokens": {},
    });
    let cases: Vec<(&str, Vec<u8>, Expected)> = vec![
        ("no_json", b"{".to_vec(), Refused("EOF")),
        (
            "brackets_in_a_row",
            "[".repeat(1_000_000).into_bytes(),
            Refused(""),
        ),
        (
            "a_charsmap_of_garbage",
            with(
                "normalizer",
                json!({ "type": "Precompiled", "precompiled_charsmap": "AAAAAAAA//////////8=" }),
            ),
            Panicked,
        ),
        (
            "a_template_of_an_unknown_token",
            with("post_processor", post_processor),
            Panicked,
        ),
        (
            "normalizers_that_double",
            with(
                "normalizer",
                json!({ "type": "Sequence", "normalizers": doubling(40) }),
            ),
            Bound,
        ),
        (
            "decoders_that_double",
            with(
                "decoder",
                json!({ "type": "Sequence", "decoders": doubling(40) }),
            ),
            Bound,
        ),
        (
            "brackets_in_a_field",
            with_text("normalizer", &"[".repeat(1_000_000)),
            Refused(""),
        ),
        (
            "a_pattern_that_backtracks",
            with(
                "normalizer",
                replace(json!({ "Regex": "(?=(a|aa)+$)((a|aa)+)+b" }), ""),
            ),
            Survived,
        ),
    ];
    let mut tests: Vec<Trial> = cases
        .into_iter()
        .map(|(name, text, expected)| trial(name, expected, move || round_trip(&text)))
        .collect();
    tests.push(Trial::test("files_that_are_none", files_that_are_none));
    tests.push(Trial::test(
        "the_largest_published_size_is_read",
        largest_published,
    ));
    tests
}

/// Checks that paths that are not regular files are refused: a device without end, a folder, a
/// missing file.
fn files_that_are_none() -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    for path in [
        Path::new("/dev/zero"),
        dir.path(),
        &dir.path().join("tokenizer.json"),
    ] {
        let error = Tokenizer::open(path).expect_err("nothing to read");
        assert!(matches!(error, TextError::Io { .. }), "{error:?}");
    }
    Ok(())
}

/// Reads a file with as many tokens and merges as the tokenizer of Gemma 3, whose file has 33 MB.
fn largest_published() -> Result<(), Failed> {
    const TOKENS: usize = 262_144;
    const MERGES: usize = 514_906;
    // All texts of one to four of these letters, the shorter ones first.
    let letters: Vec<char> = "abcdefghijklmnopqrstuvw".chars().collect();
    let mut words: Vec<String> = letters.iter().map(char::to_string).collect();
    for index in 0.. {
        if words.len() >= TOKENS {
            break;
        }
        words.extend(
            letters
                .iter()
                .map(|letter| format!("{}{letter}", words[index]))
                .collect::<Vec<_>>(),
        );
    }
    words.truncate(TOKENS);
    let mut merges = Vec::new();
    for word in words.iter().filter(|word| word.len() > 1) {
        merges.extend((1..word.len()).map(|at| json!([word[..at], word[at..]])));
    }
    merges.truncate(MERGES);
    let vocab: serde_json::Map<String, Value> = words
        .iter()
        .enumerate()
        .map(|(id, word)| (word.clone(), id.into()))
        .collect();
    let json = json!({ "version": "1.0", "added_tokens": [], "model": { "type": "BPE", "vocab": vocab, "merges": merges } });
    let text = serde_json::to_string_pretty(&json)?;
    let model = &json["model"];
    assert_eq!(
        (
            model["vocab"].as_object().map(|vocab| vocab.len()),
            model["merges"].as_array().map(Vec::len)
        ),
        (Some(TOKENS), Some(MERGES))
    );
    assert!(text.len() > 28_000_000, "{} bytes", text.len());
    Ok(round_trip(text.as_bytes()).or_else(|error| match error {
        // The text has letters without a token.
        TextError::Tokenizer { .. } if format!("{error:?}").contains("unk") => Ok(()),
        error => Err(error),
    })?)
}
