use std::collections::VecDeque;

use marlin_testing::{byte_level_tokenizer, open_tokenizer};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::json;

use super::*;

fn tokenizer(json: &serde_json::Value) -> Tokenizer {
    open_tokenizer(json, |path| Tokenizer::open(path).unwrap())
}

/// Returns a tokenizer with one token for each byte.
fn byte_level() -> Tokenizer {
    tokenizer(&byte_level_tokenizer())
}

/// Returns a byte-level tokenizer with tokens that end or begin inside a character: "a" and the
/// first byte of "ä", its second byte and "b".
fn byte_level_with_merges() -> Tokenizer {
    let mut json = byte_level_tokenizer();
    json["model"]["vocab"]["aÃ"] = 258.into();
    json["model"]["vocab"]["¤b"] = 259.into();
    json["model"]["merges"] = json!([["a", "Ã"], ["¤", "b"]]);
    tokenizer(&json)
}

/// Returns a tokenizer with byte fallback, like that of Llama 2: bytes 0..=255 as `<0x00>` and so
/// on, then words whose spaces are `▁`.
fn byte_fallback() -> Tokenizer {
    let mut vocab: serde_json::Map<_, _> = (0..256)
        .map(|byte| (format!("<0x{byte:02X}>"), json!(byte)))
        .collect();
    for word in ["▁Hello", "▁world", "▁", "a", "ä"] {
        vocab.insert(word.into(), vocab.len().into());
    }
    tokenizer(&json!({
        "version": "1.0",
        "added_tokens": [],
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] },
        "model": { "type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true, "fuse_unk": true },
    }))
}

const HELLO: u32 = 256;
const WORLD: u32 = 257;
const SPACE: u32 = 258;
const LETTER: u32 = 259;

/// Returns the pieces of a stream: one for each token, and one at the end.
fn pieces(tokenizer: &Tokenizer, prompt: &[u32], tokens: &[u32]) -> Vec<Option<String>> {
    let mut stream = TextStream::after(tokenizer, prompt).unwrap();
    let mut pieces: Vec<_> = tokens
        .iter()
        .map(|&token| stream.push(token).unwrap())
        .collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

fn joined(pieces: &[Option<String>]) -> String {
    pieces.iter().flatten().map(String::as_str).collect()
}

fn some(text: &str) -> Option<String> {
    Some(text.into())
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn characters_are_held_back_until_they_are_whole() {
    for tokenizer in [byte_level(), byte_fallback()] {
        let found = pieces(&tokenizer, &[], &bytes("aä€😀"));
        let expected = [
            some("a"),
            None,
            some("ä"),
            None,
            None,
            some("€"),
            None,
            None,
            None,
            some("😀"),
            None,
        ];
        assert_eq!(found, expected);
    }
}

#[test]
fn tokens_that_end_inside_of_a_character_give_what_is_whole() {
    let tokenizer = byte_level_with_merges();
    // The first token is "a" and the first byte of "ä", the second token its second byte and "b".
    assert_eq!(
        pieces(&tokenizer, &[], &[258, 259]),
        [some("a"), some("äb"), None]
    );
    assert_eq!(
        pieces(&tokenizer, &[], &[258, 259, 258, 0xa4, 258, 259]),
        [
            some("a"),
            some("äb"),
            some("a"),
            some("ä"),
            some("a"),
            some("äb"),
            None
        ]
    );
}

#[test]
fn words_keep_the_space_before_them() {
    let tokenizer = byte_fallback();
    assert_eq!(
        pieces(&tokenizer, &[], &[HELLO, WORLD, SPACE, SPACE, LETTER]),
        [
            some("Hello"),
            some(" world"),
            some(" "),
            some(" "),
            some("a"),
            None
        ]
    );
    // After a prompt the first word is not the first of the text.
    assert_eq!(
        pieces(&tokenizer, &[HELLO], &[WORLD, WORLD]),
        [some(" world"), some(" world"), None]
    );
    let long: Vec<u32> = [HELLO; 30].to_vec();
    assert_eq!(joined(&pieces(&tokenizer, &long, &[WORLD])), " world");
}

#[test]
fn most_tokens_have_a_plain_text() {
    let tokenizer = byte_level_with_merges().with_plain_texts().unwrap();
    let texts = [97, 258, 0xc3, 257, 9000].map(|token| tokenizer.plain_text(token));
    assert_eq!(texts, [Some("a"), None, None, None, None]);
    // A run of bytes is decoded together, and a space may be removed.
    let tokenizer = byte_fallback().with_plain_texts().unwrap();
    let texts = [97, HELLO, SPACE, LETTER].map(|token| tokenizer.plain_text(token));
    assert_eq!(texts, [None, Some(" Hello"), None, Some("a")]);
}

#[test]
fn special_tokens_are_not_text() {
    let tokenizer = byte_level();
    assert_eq!(
        joined(&pieces(
            &tokenizer,
            &[256],
            &[257, 257, 257, 257, 257, 0xc3, 0xa4, 257]
        )),
        "ä"
    );
    // Special tokens do not count towards the tokens that an unfinished character waits for.
    assert_eq!(
        pieces(&tokenizer, &[], &[257, 257, 257, 257, 257, 0xc3, 0xa4])[5..],
        [None, some("ä"), None]
    );
}

#[test]
fn bytes_that_are_no_character_come_as_replacements() {
    let replacement = char::REPLACEMENT_CHARACTER;
    for tokenizer in [byte_level(), byte_fallback()] {
        // An unfinished character at the end, and one before a letter.
        assert_eq!(
            joined(&pieces(&tokenizer, &[], &[u32::from(b'a'), 0xe2, 0x82]))
                .chars()
                .next(),
            Some('a')
        );
        assert!(
            joined(&pieces(&tokenizer, &[], &[u32::from(b'a'), 0xe2, 0x82])).ends_with(replacement)
        );
        // Bytes that never become a character are not held back forever.
        let found = pieces(&tokenizer, &[], &[0xff; 12]);
        assert!(found[..4].iter().any(Option::is_some), "{found:?}");
        assert!(joined(&found).chars().all(|c| c == replacement));
        assert_eq!(joined(&found).chars().count(), 12);
    }
    // A run of bytes is valid UTF-8, and no longer valid with the next byte: returned text stays
    // unchanged.
    let found = pieces(&byte_fallback(), &[], &[0xc3, 0xa4, 0xe2, LETTER]);
    assert_eq!(found, [None, some("ä"), None, some("\u{fffd}a"), None]);
    // A text may contain the replacement character itself.
    for tokenizer in [byte_level(), byte_fallback()] {
        assert_eq!(
            joined(&pieces(
                &tokenizer,
                &[],
                &bytes("\u{fffd}\u{fffd}x\u{fffd}")
            )),
            "\u{fffd}\u{fffd}x\u{fffd}"
        );
    }
}

#[test]
fn texts_are_encoded_with_what_starts_them() {
    let tokenizer = byte_level();
    assert_eq!(tokenizer.encode("aä").unwrap(), [256, 97, 0xc3, 0xa4]);
    assert_eq!(tokenizer.decode(&[256, 97, 0xc3, 0xa4, 257]).unwrap(), "aä");
    assert_eq!(tokenizer.token_id("</s>").unwrap(), Some(257));
    assert_eq!(
        (tokenizer.vocab_size(), byte_fallback().vocab_size()),
        (258, 261)
    );
}

#[test]
fn only_texts_with_a_token_that_the_model_does_not_have_are_refused() {
    for (vocab_size, refused) in [(258, false), (1000, false), (257, true)] {
        let tokenizer = byte_level().for_model(vocab_size);
        assert_eq!(tokenizer.encode("a").unwrap(), [256, 97]);
        match tokenizer.encode_rendered("b</s>") {
            Ok(tokens) => assert!(!refused && tokens == [98, 257]),
            Err(TextError::TokenOutsideVocabulary {
                token,
                id,
                vocab_size: 257,
                ..
            }) => assert_eq!((token.as_str(), id), ("</s>", 257)),
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn truncation_and_padding_of_the_file_are_left_out() {
    let mut json = byte_level_tokenizer();
    json["truncation"] =
        json!({ "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0 });
    json["padding"] = json!({ "strategy": { "Fixed": 20 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "x" });
    assert_eq!(tokenizer(&json).encode("abcdef").unwrap().len(), 7);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, rng_seed: RngSeed::Fixed(marlin_testing::seed()), ..ProptestConfig::default() })]

    /// Tests that the pieces join to the text wherever tokens split characters, and that no byte is
    /// held back after its character is complete.
    #[test]
    fn pieces_join_to_the_text(text in "[a-zäß€漢😀\u{fffd} ]{0,40}", merged in any::<bool>()) {
        let tokenizer = if merged { byte_level_with_merges() } else { byte_level() };
        let tokens = tokenizer.encode(&text).unwrap();
        let found = pieces(&tokenizer, &[256], &tokens[1..]);
        prop_assert_eq!(joined(&found), text.clone());
        // The text returned up to each token is the longest valid prefix of the bytes so far,
        // except for replacement characters, which may wait.
        if !text.contains(char::REPLACEMENT_CHARACTER) {
            let mut waiting: VecDeque<u8> = VecDeque::new();
            for (&token, piece) in tokens[1..].iter().zip(&found) {
                waiting.extend(match token {
                    258 => b"a\xc3".to_vec(),
                    259 => b"\xa4b".to_vec(),
                    byte => vec![byte as u8],
                });
                let piece = piece.as_deref().unwrap_or("");
                waiting.drain(..piece.len());
                prop_assert!(std::str::from_utf8(waiting.make_contiguous()).is_err() || waiting.is_empty());
                prop_assert!(waiting.len() < 4);
            }
        }
    }

    /// Tests that byte-level decoding token by token gives the same text as decoding all at once,
    /// for any bytes, valid UTF-8 or not.
    #[test]
    fn any_bytes_join_to_what_they_decode_to(tokens in proptest::collection::vec(0u32..256, 0..40)) {
        let tokenizer = byte_level();
        prop_assert_eq!(joined(&pieces(&tokenizer, &[], &tokens)), tokenizer.decode(&tokens).unwrap());
    }

    /// Tests that a stream gives the same pieces whether or not it knows plain texts.
    #[test]
    fn plain_texts_change_nothing(
        prompt in proptest::collection::vec(0u32..262, 0..4),
        tokens in proptest::collection::vec(prop_oneof![0u32..262, 30..126u32, 256..262u32], 0..40),
    ) {
        for tokenizer in [byte_level(), byte_level_with_merges(), byte_fallback()] {
            let plain = tokenizer.clone().with_plain_texts().unwrap();
            let expected = pieces(&tokenizer, &prompt, &tokens);
            prop_assert_eq!(pieces(&plain, &prompt, &tokens), expected, "{:?}", tokenizer.plain_text(97));
        }
    }

    /// Tests that any tokens, including special and unknown tokens, are decoded without a panic or
    /// an error.
    #[test]
    fn any_tokens_are_taken(tokens in proptest::collection::vec(0u32..300, 0..40)) {
        pieces(&byte_level(), &tokens, &tokens);
        pieces(&byte_fallback(), &tokens, &tokens);
    }
}
