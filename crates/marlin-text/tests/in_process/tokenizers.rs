//! Files `tokenizer.json`.

use std::fs;
use std::path::Path;

use marlin_text::{Failure, TextError, TextStream, Tokenizer};
use serde_json::{Value, json};

use crate::failure;

/// Returns a tokenizer with one token for each byte.
fn byte_level() -> Value {
    serde_json::from_str(include_str!("../byte_level.json")).unwrap()
}

fn open(dir: &Path, json: &str) -> Result<Tokenizer, TextError> {
    let path = dir.join("tokenizer.json");
    fs::write(&path, json).unwrap();
    Tokenizer::open(&path)
}

/// Returns the tokenizer with a decoder that panics for texts of one `a`.
fn panics_for_one_a() -> String {
    let mut json = byte_level();
    json["decoder"] = json!({ "type": "Strip", "content": "a", "start": 0, "stop": 2 });
    json.to_string()
}

#[test]
fn a_tokenizer_works_again_after_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = open(dir.path(), &panics_for_one_a()).unwrap();
    for _ in 0..3 {
        let result = tokenizer.decode(&[97]);
        assert!(
            matches!(failure(&result), Failure::Panicked(_)),
            "{result:?}"
        );
        assert_eq!(tokenizer.decode(&[98]).unwrap(), "b");
        assert_eq!(tokenizer.encode("ab").unwrap(), [256, 97, 98]);
    }
}

/// Checks that the file is read again after a panic.
#[test]
fn a_tokenizer_is_loaded_again_after_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = open(dir.path(), &panics_for_one_a()).unwrap();
    let result = tokenizer.decode(&[97]);
    assert!(
        matches!(failure(&result), Failure::Panicked(_)),
        "{result:?}"
    );
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let result = tokenizer.decode(&[98]);
    assert!(matches!(failure(&result), Failure::File(_)), "{result:?}");
}

#[test]
fn a_panic_of_loading_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut json = byte_level();
    json["normalizer"] =
        json!({ "type": "Precompiled", "precompiled_charsmap": "AAAAAAAA//////////8=" });
    let result = open(dir.path(), &json.to_string());
    assert!(
        matches!(failure(&result), Failure::Panicked(_)),
        "{result:?}"
    );
}

#[test]
fn deep_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut json = byte_level();
    json["normalizer"] = "@".into();
    let text = json.to_string().replace("\"@\"", &"[".repeat(1_000_000));
    for text in ["[".repeat(1_000_000), text] {
        let result = open(dir.path(), &text);
        assert!(
            matches!(failure(&result), Failure::Refused(_)),
            "{result:?}"
        );
    }
}

/// Components nested as deep as JSON may be run on the caller's stack, here of 512 KiB.
#[test]
fn nested_components_run_on_a_small_stack() {
    let dir = tempfile::tempdir().unwrap();
    let nested = |name: &str, inner: Value| {
        (0..40).fold(
            inner,
            |inner, _| json!({ "type": "Sequence", name: [inner] }),
        )
    };
    let mut json = byte_level();
    json["normalizer"] = nested("normalizers", json!({ "type": "NFC" }));
    json["decoder"] = nested("decoders", json["decoder"].clone());
    let tokenizer = open(dir.path(), &json.to_string()).unwrap();
    let decoded = std::thread::Builder::new()
        .stack_size(512 << 10)
        .spawn(move || tokenizer.decode(&tokenizer.encode("ab")?))
        .unwrap()
        .join()
        .unwrap();
    assert_eq!(decoded.unwrap(), "ab");
}

#[test]
fn tokens_have_the_bytes_that_decoding_writes() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = open(dir.path(), &byte_level().to_string()).unwrap();
    let bytes = tokenizer.token_bytes().unwrap();
    assert_eq!(bytes.len(), 258);
    for byte in 0..=255 {
        assert_eq!(bytes[&u32::from(byte)], [byte]);
    }
    assert_eq!(bytes[&257], b"</s>");
    let text = "Zoë 😀\n\u{7f}";
    let tokens = tokenizer.encode_rendered(text).unwrap();
    let joined: Vec<u8> = tokens
        .iter()
        .flat_map(|token| bytes[token].clone())
        .collect();
    assert_eq!(joined, text.as_bytes());
}

#[test]
fn special_tokens_are_skipped_unless_they_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let skips = open(dir.path(), &byte_level().to_string()).unwrap();
    let shows = skips.clone().showing(&["</s>", "a", "none"]).unwrap();
    // The bytes of two characters, with special tokens between and within them.
    let tokens = [257, 97, 0xC3, 0xA9, 256, 257, 257, 0xC3, 257, 0xA9, 98, 257];
    assert_eq!(skips.decode(&tokens).unwrap(), "aééb");
    let shown = "</s>aé</s></s>\u{FFFD}</s>\u{FFFD}b</s>";
    assert_eq!(shows.decode(&tokens).unwrap(), shown);
    for prompt in [&[][..], &[98], &[257]] {
        let mut stream = TextStream::after(&shows, prompt).unwrap();
        let mut text = String::new();
        for token in tokens {
            text += &stream.push(token).unwrap().unwrap_or_default();
        }
        text += &stream.finish().unwrap().unwrap_or_default();
        assert_eq!(text, shown);
    }
    assert!(
        shows.is_special(257)
            && shows.clone().showing(&[]).unwrap().decode(&[257]).unwrap() == "</s>"
    );
}
