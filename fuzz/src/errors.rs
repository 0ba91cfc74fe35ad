//! The requirements on every error.

use std::error::Error;

/// An error has a message, and so do its causes.
pub fn check_error(error: &dyn Error) {
    let mut next = Some(error);
    while let Some(cause) = next {
        assert!(!cause.to_string().is_empty());
        next = cause.source();
    }
}
