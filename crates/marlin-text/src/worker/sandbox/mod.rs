//! Worker processes, which limit the time and the memory of every call.

mod child;
mod process;
mod protocol;

use std::sync::atomic::{AtomicBool, Ordering};

pub(super) use self::process::Process;

/// True if the program's `main` handles the argument that starts a worker process.
static ON: AtomicBool = AtomicBool::new(false);

/// Lets chat templates and tokenizers run in separate processes, which are started from this
/// program's executable. Call it first in `main`: in a worker process it does not return.
///
/// Chat templates and tokenizers that were opened before this call stay in the program's own
/// process. In a program that does not call `init`, all of them do: see the
/// [crate's documentation](crate).
pub fn init() {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|argument| argument == process::ARGUMENT)
    {
        child::run();
    }
    ON.store(true, Ordering::Relaxed);
}

/// Returns true if the program has called [`init`].
pub(super) fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}
