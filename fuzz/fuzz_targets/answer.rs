//! Fuzz target: bytes that select the tags and the length of pieces, and the text of an answer
//! that may have reasoning.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    marlin_fuzz::answer(data);
});
