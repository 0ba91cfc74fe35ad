//! Seeds and operations for fuzz targets of chat templates and `tokenizer.json` files. Every
//! failure of a worker must become an error within the time limit.
//!
//! `crates/marlin-text/tests/hostile` includes this module, and runs it on mutated inputs wherever
//! the tests run.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use marlin_text::{ChatTemplate, Message, TextError, Tokenizer};
use tempfile::TempDir;

use super::errors::check_error;

/// The maximum time for one input. A worker has four seconds for each call, and the machine may be
/// busy.
const MOST: Duration = Duration::from_secs(20);

/// Returns published templates.
pub fn template_seeds() -> Vec<Vec<u8>> {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../tests/golden/chat_templates.json"))
            .expect("valid JSON");
    let templates = golden["templates"].as_object().expect("templates by name");
    templates
        .values()
        .filter_map(|text| Some(text.as_str()?.as_bytes().to_vec()))
        .collect()
}

/// Returns tokenizers: byte-level BPE, BPE with byte fallback, WordPiece and Unigram. Each has
/// other components that a file may contain beside the model.
pub fn tokenizer_seeds() -> Vec<Vec<u8>> {
    let sentence_piece = r#"{"version":"1.0","truncation":{"direction":"Right","max_length":8,"strategy":"LongestFirst","stride":0},"padding":null,
        "added_tokens":[{"id":0,"content":"<unk>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
        "normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"_"},{"type":"Replace","pattern":{"String":" "},"content":"_"}]},
        "pre_tokenizer":{"type":"Split","pattern":{"Regex":"(?i:'s|'t)|\\p{L}+|\\s+(?!\\S)|."},"behavior":"Isolated","invert":false},
        "post_processor":null,"decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"_"},"content":" "},
        {"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]},"model":{"type":"BPE","dropout":null,
        "unk_token":"<unk>","fuse_unk":true,"byte_fallback":true,"vocab":{"<unk>":0,"<0x61>":1,"H":2,"e":3,"l":4,"He":5,"ll":6,"_":7},
        "merges":[["H","e"],["l","l"]]}}"#;
    let words = r#"{"version":"1.0","added_tokens":[],"normalizer":{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,
        "strip_accents":null,"lowercase":true},"pre_tokenizer":{"type":"BertPreTokenizer"},"post_processor":{"type":"BertProcessing",
        "sep":["[SEP]",1],"cls":["[CLS]",2]},"decoder":{"type":"WordPiece","prefix":"@@","cleanup":true},"model":{"type":"WordPiece",
        "unk_token":"[UNK]","continuing_subword_prefix":"@@","max_input_chars_per_word":100,"vocab":{"[UNK]":0,"[SEP]":1,"[CLS]":2,"hello":3}}}"#;
    let unigram = r#"{"version":"1.0","added_tokens":[],"normalizer":{"type":"NFKC"},
        "pre_tokenizer":{"type":"Metaspace","replacement":"_","prepend_scheme":"always","split":true},"decoder":{"type":"Metaspace",
        "replacement":"_","prepend_scheme":"always"},"model":{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0],["_He",-1.5],["llo",-2.0]]}}"#;
    let byte_level = include_str!("../../crates/marlin-text/tests/byte_level.json");
    [
        byte_level,
        sentence_piece,
        &words.replace("@@", "##"),
        unigram,
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}

/// Compiles a template and renders a conversation. Returns true on success.
pub fn template(data: &[u8]) -> bool {
    in_time(|| {
        let text = String::from_utf8_lossy(data);
        let tokens = BTreeMap::from([
            ("bos_token".to_string(), "<s>".to_string()),
            ("eos_token".to_string(), "</s>".to_string()),
        ]);
        let template = ChatTemplate::compile(&text, "chat_template.jinja".into(), tokens)?;
        template
            .render(
                &[
                    Message::user("A question?"),
                    Message::assistant("An answer."),
                    Message::user("Another?"),
                ],
                true,
            )
            .map(drop)
    })
}

/// A folder with one `tokenizer.json`, which is overwritten for every input.
pub struct TokenizerFolder(TempDir);

impl TokenizerFolder {
    /// Creates a folder in the system's folder for temporary files.
    #[allow(
        clippy::new_without_default,
        reason = "it makes a folder; the tests' module, which is not public, does not lint it"
    )]
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    /// Opens a tokenizer, encodes a text and decodes it again. Returns true on success.
    pub fn tokenizer(&self, data: &[u8]) -> bool {
        let path = self.0.path().join("tokenizer.json");
        fs::write(&path, data).expect("a temporary file can be written");
        in_time(|| {
            let tokenizer = Tokenizer::open(&path)?;
            let tokens = tokenizer.encode("Hello, hello it's <s> 漢字")?;
            tokenizer.decode(&tokens).map(drop)
        })
    }
}

/// Returns true if `run` succeeds. Otherwise it must return an error with a message. In either case
/// it must stay within the time limit.
fn in_time(run: impl FnOnce() -> Result<(), TextError>) -> bool {
    let start = Instant::now();
    let result = run();
    assert!(
        start.elapsed() < MOST,
        "{result:?} after {:?}",
        start.elapsed()
    );
    result.inspect_err(|error| check_error(error)).is_ok()
}
