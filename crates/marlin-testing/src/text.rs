use std::path::{Path, PathBuf};

use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::{Map, Value, json};

use crate::repository_file;

/// Returns the path of a `tokenizer.json` of byte-level BPE with the bytes 0..=255 as tokens, then
/// `<s>` 256 and `</s>` 257. It starts texts with `<s>`.
pub fn byte_level_file() -> PathBuf {
    repository_file("crates/marlin-text/tests/byte_level.json")
}

/// Reads the tokenizer of [`byte_level_file`].
///
/// # Panics
/// Panics if the file is missing.
#[track_caller]
pub fn byte_level_tokenizer() -> Value {
    serde_json::from_slice(&std::fs::read(byte_level_file()).unwrap()).unwrap()
}

/// Returns a `tokenizer.json` of BPE with byte fallback, without merges. The tokens are the special
/// ones, `<0x00>` to `<0xFF>`, then the others; a token that is there twice counts once.
pub fn byte_fallback_tokenizer(
    special: &[&str],
    tokens: impl IntoIterator<Item = String>,
) -> Value {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let special_tokens = special.iter().map(ToString::to_string);
    let mut vocabulary = Map::new();
    for token in special_tokens.chain(bytes).chain(tokens) {
        let id = vocabulary.len();
        vocabulary.entry(token).or_insert(id.into());
    }
    let added: Vec<Value> = special
        .iter()
        .map(|text| {
            json!({
                "id": vocabulary[*text], "content": text, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })
        })
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": added,
        "decoder": { "type": "ByteFallback" },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": true },
    })
}

/// Writes a `tokenizer.json` to a temporary folder, and returns what `open` makes of its path.
pub fn open_tokenizer<T>(tokenizer: &Value, open: impl FnOnce(&Path) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    open(&path)
}

/// Divides a text into pieces of 1 to `longest` characters. The last piece may be empty.
pub fn random_pieces<'a>(text: &'a str, longest: usize, rng: &mut StdRng) -> Vec<&'a str> {
    let (mut pieces, mut rest) = (Vec::new(), text);
    while let Some((end, _)) = rest.char_indices().nth(rng.random_range(1..=longest)) {
        let (piece, after) = rest.split_at(end);
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}
