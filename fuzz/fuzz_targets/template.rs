//! Fuzz target: the text of a chat template.
#![no_main]

libfuzzer_sys::fuzz_target!(init: marlin_text::init(), |data: &[u8]| {
    marlin_fuzz::template(data);
});
