//! The core that a thread runs on, if the system reports it.

#[cfg(target_os = "linux")]
use rustix::thread::{sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The calling thread's core.
#[cfg(target_os = "linux")]
pub fn current() -> Option<usize> {
    Some(sched_getcpu())
}

/// Moves the calling thread to another core, of those that it may run on.
#[cfg(target_os = "linux")]
pub fn leave(core: usize) {
    let Ok(allowed) = sched_getaffinity(None) else {
        return;
    };
    let mut others = allowed;
    others.unset(core);
    if others.count() > 0 && sched_setaffinity(None, &others).is_ok() {
        // It has moved, and may go anywhere again. Where this fails, it keeps to the others.
        _ = sched_setaffinity(None, &allowed);
    }
}

#[cfg(not(target_os = "linux"))]
pub fn current() -> Option<usize> {
    None
}

#[cfg(not(target_os = "linux"))]
pub fn leave(_core: usize) {}
