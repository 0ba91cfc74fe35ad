//! Fuzz target: bytes that select the format and the length of pieces, and the text of an
//! answer that may call tools.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    marlin_fuzz::tool_call(data);
});
