//! Helpers shared by the tests.

use std::error::Error;
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use marlin_text::{Failure, TextError};

/// The longest time that a call may take: its limit of four seconds, and the start and end of a
/// process on a busy machine.
const MOST: Duration = Duration::from_secs(8);

/// The expected outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// An error of the library whose message contains this text.
    Refused(&'static str),
    /// The limit of time or of memory, whichever is reached first on this machine.
    Bound,
    /// Nesting deeper than the limit.
    Nesting,
    /// More steps than the limit.
    Steps,
    /// More output than the limit.
    Output,
    /// A panic.
    Panicked,
    /// An error or none, depending on the version of the library; the caller survives.
    Survived,
}

/// Creates a test of one input.
pub fn trial(
    name: &str,
    expected: Expected,
    run: impl FnOnce() -> Result<(), TextError> + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        let start = Instant::now();
        let found = run();
        let took = start.elapsed();
        let as_expected = match (&found, expected) {
            (Ok(()), expected) => expected == Expected::Survived,
            (Err(error), expected) => match (failure(error), expected) {
                (Some(Failure::Refused(message)), Expected::Refused(part)) => {
                    message.contains(part)
                }
                (Some(Failure::Time { .. } | Failure::Memory { .. }), Expected::Bound)
                | (Some(Failure::Nesting), Expected::Nesting)
                | (Some(Failure::Steps { .. }), Expected::Steps)
                | (Some(Failure::Output { .. }), Expected::Output)
                | (Some(Failure::Panicked(_)), Expected::Panicked)
                | (
                    Some(Failure::Refused(_) | Failure::Panicked(_) | Failure::Nesting),
                    Expected::Survived,
                ) => true,
                _ => false,
            },
        };
        if !as_expected || took > MOST {
            return Err(Failed::from(format!(
                "expected {expected:?}, found {found:?} after {took:?}"
            )));
        }
        Ok(())
    })
}

/// Returns the failure of a worker.
pub fn failure(error: &TextError) -> Option<&Failure> {
    error.source()?.downcast_ref()
}
