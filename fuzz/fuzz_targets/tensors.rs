//! Fuzz target: a byte that selects the format, and the bytes of a `model.safetensors`, from which
//! one layer is read.
#![no_main]

use std::sync::LazyLock;

use marlin_fuzz::Folder;

static FOLDER: LazyLock<Folder> = LazyLock::new(Folder::new);

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    FOLDER.tensors(data);
});
