//! Fuzz target: a byte that selects the route, and the body of a request.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    marlin_fuzz::body(data);
});
