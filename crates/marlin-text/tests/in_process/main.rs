//! Templates and tokenizers in the program's own process: whatever they do, a call is an error or
//! succeeds, and the next call works. The tests do not call `init`.

mod templates;
mod tokenizers;

use std::error::Error;

use marlin_text::{Failure, TextError};

/// Returns the failure of a template or a tokenizer.
#[track_caller]
fn failure<T: std::fmt::Debug>(result: &Result<T, TextError>) -> &Failure {
    let error = result.as_ref().expect_err("a failure");
    error
        .source()
        .and_then(|source| source.downcast_ref())
        .unwrap_or_else(|| panic!("{error:?}"))
}
