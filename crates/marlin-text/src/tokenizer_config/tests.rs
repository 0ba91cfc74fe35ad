use std::fs;

use marlin_testing::{byte_level_tokenizer, golden_json};
use serde_json::json;

use super::*;
use crate::{ChatTemplate, Message, Tokenizer};

/// Creates a folder with the byte-level tokenizer, to which `added_tokens` are added, and with
/// `files` beside it.
fn folder(added_tokens: &Value, files: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut tokenizer = byte_level_tokenizer();
    tokenizer["added_tokens"]
        .as_array_mut()
        .unwrap()
        .extend(added_tokens.as_array().unwrap().iter().cloned());
    fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    for (name, file) in files.as_object().unwrap() {
        fs::write(dir.path().join(name), file.to_string()).unwrap();
    }
    dir
}

fn open(dir: &tempfile::TempDir) -> Result<Tokenizer, TextError> {
    Tokenizer::open(&dir.path().join("tokenizer.json"))
}

#[test]
fn tokens_of_configs_count_as_transformers_counts_them() {
    let golden = golden_json("tokenizer_configs.json");
    let text = golden["text"].as_str().unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 70, "{}", cases.len());
    for case in cases {
        let name = &case["name"];
        let dir = folder(&case["added_tokens"], &case["files"]);
        let tokenizer = open(&dir).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        let ids = |field: &str| -> Vec<u32> { Deserialize::deserialize(&case[field]).unwrap() };
        assert_eq!(
            tokenizer.encode_rendered(text).unwrap(),
            ids("ids"),
            "{name}"
        );
        assert_eq!(
            tokenizer.vocab_size(),
            case["vocab_size"].as_u64().unwrap() as usize,
            "{name}"
        );
        let special: Vec<u32> = (0..tokenizer.vocab_size() as u32)
            .filter(|&token| tokenizer.is_special(token))
            .collect();
        assert_eq!(special, ids("special"), "{name}");
        assert_eq!(
            tokenizer.decode(&ids("ids")).unwrap(),
            case["decoded"].as_str().unwrap(),
            "{name}"
        );
        let tokens = TokenizerConfig::read(dir.path()).unwrap().template_tokens();
        assert_eq!(
            serde_json::to_value(tokens).unwrap(),
            case["special_tokens"],
            "{name}"
        );
    }
}

#[test]
fn an_added_token_after_an_answer_ends_the_turn() {
    let template =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    let added = json!({ "<|im_start|>": 258, "<|im_end|>": 259 });
    // A token that is special by its name, or a fine-tune's token without a name.
    for (eos, is_special, stops) in [
        ("<|im_end|>", true, vec![259, 259]),
        ("</s>", false, vec![257, 259]),
    ] {
        let files = json!({ "tokenizer_config.json": { "chat_template": template, "eos_token": eos }, "added_tokens.json": added });
        let dir = folder(&json!([]), &files);
        let (tokenizer, template) = (
            open(&dir).unwrap(),
            ChatTemplate::open(dir.path()).unwrap().unwrap(),
        );
        let text = template.render(&[Message::user("a")], true).unwrap();
        let expected = [&[258], &b"user\na".map(u32::from)[..], &[259, 10]].concat();
        assert_eq!(tokenizer.encode_rendered(&text).unwrap(), expected);
        assert_eq!(
            (
                tokenizer.is_special(259),
                tokenizer.is_added(259),
                tokenizer.is_added(97)
            ),
            (is_special, true, false)
        );
        assert_eq!(template.stop_tokens(&tokenizer), stops);
    }
}

#[test]
fn the_harmony_format_has_ends_of_its_own() {
    let template = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>\
                    {{ m.content }}<|end|>{% endfor %}";
    let names = ["start", "channel", "message", "end", "return", "call"];
    let added: serde_json::Map<_, _> = (names.iter().zip(258..))
        .map(|(name, id)| (format!("<|{name}|>"), json!(id)))
        .collect();
    for (eos, stops) in [("</s>", [257, 262, 263]), ("<|return|>", [262, 262, 263])] {
        let files = json!({ "tokenizer_config.json": { "chat_template": template, "eos_token": eos }, "added_tokens.json": added });
        let dir = folder(&json!([]), &files);
        let template = ChatTemplate::open(dir.path()).unwrap().unwrap();
        assert!(template.is_harmony());
        assert_eq!(template.stop_tokens(&open(&dir).unwrap()), stops);
    }
    let other = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}";
    let other = ChatTemplate::compile(other, "other".into(), Default::default());
    assert!(!other.unwrap().is_harmony());
}

#[test]
fn configs_that_hold_something_else_are_named() {
    let cases = [
        (
            "tokenizer_config.json",
            json!({ "added_tokens_decoder": ["<a>"] }),
        ),
        (
            "tokenizer_config.json",
            json!({ "added_tokens_decoder": { "first": { "content": "<a>" } } }),
        ),
        (
            "tokenizer_config.json",
            json!({ "added_tokens_decoder": { "258": { "id": 1 } } }),
        ),
        ("added_tokens.json", json!({ "<a>": -1 })),
        ("special_tokens_map.json", json!(["<a>"])),
    ];
    for (name, file) in cases {
        match open(&folder(&json!([]), &json!({ name: file }))) {
            Err(TextError::Json { path, .. }) => assert!(path.ends_with(name), "{path:?}"),
            other => panic!("{name} {file}: {other:?}"),
        }
    }
    // Values that are not tokens are ignored.
    let files = json!({ "tokenizer_config.json": { "bos_token": 3, "eos_token": null, "add_bos_token": true, "extra_special_tokens": [7] } });
    assert_eq!(open(&folder(&json!([]), &files)).unwrap().vocab_size(), 258);
}
