//! Fuzz target: the text of a `tokenizer.json`.
#![no_main]

use std::sync::LazyLock;

use marlin_fuzz::TokenizerFolder;

static FOLDER: LazyLock<TokenizerFolder> = LazyLock::new(TokenizerFolder::new);

libfuzzer_sys::fuzz_target!(init: marlin_text::init(), |data: &[u8]| {
    FOLDER.tokenizer(data);
});
