//! Fuzz target: the text of a `config.json` or a `quantize_config.json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| marlin_fuzz::config(data));
