//! Queries the core that a thread runs on, and moves a thread off a core.

#[cfg(target_os = "linux")]
use rustix::thread::{sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Returns the calling thread's core; `None` if the system does not report it.
#[cfg(target_os = "linux")]
pub fn current() -> Option<usize> {
    Some(sched_getcpu())
}

/// Moves the calling thread from core `core` to another core of its affinity mask.
#[cfg(target_os = "linux")]
pub fn move_off(core: usize) {
    let Ok(allowed) = sched_getaffinity(None) else {
        return;
    };
    let mut others = allowed;
    others.unset(core);
    if others.count() > 0 && sched_setaffinity(None, &others).is_ok() {
        // The thread has moved, so the old mask is restored. If this fails, the thread stays off
        // the core.
        _ = sched_setaffinity(None, &allowed);
    }
}

#[cfg(not(target_os = "linux"))]
pub fn current() -> Option<usize> {
    None
}

#[cfg(not(target_os = "linux"))]
pub fn move_off(_core: usize) {}
