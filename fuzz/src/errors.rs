//! Checks that apply to every error.

use std::error::Error;

/// Checks that an error and all of its causes have a message.
pub fn check_error(error: &dyn Error) {
    let mut next = Some(error);
    while let Some(cause) = next {
        assert!(!cause.to_string().is_empty());
        next = cause.source();
    }
}
