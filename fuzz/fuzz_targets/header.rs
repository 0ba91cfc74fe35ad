//! Fuzz target: the bytes of a `model.safetensors`, which is opened.
#![no_main]

use std::sync::LazyLock;

use marlin_fuzz::Folder;

static FOLDER: LazyLock<Folder> = LazyLock::new(Folder::new);

libfuzzer_sys::fuzz_target!(|data: &[u8]| FOLDER.header(data));
