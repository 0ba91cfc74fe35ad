//! The main loop of a worker process, and its limits.

use std::io;
use std::process::{abort, exit};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::protocol::{Limits, read_request, write_reply};
use crate::worker::session::Session;

/// The line that a worker writes before it ends itself because it took too long.
pub(super) const TIMED_OUT: &str = "marlin-text-worker: out of time";

/// Answers requests until there are no more.
pub(super) fn run() -> ! {
    // The reply to a request that panics has the panic's message.
    std::panic::set_hook(Box::new(|_| {}));
    exit(i32::from(answer_all().is_err()))
}

fn answer_all() -> io::Result<()> {
    let (mut requests, mut replies) = (io::stdin().lock(), io::stdout().lock());
    let (mut session, watchdog) = (Session::default(), Watchdog::start()?);
    while let Some((head, body)) = read_request(&mut requests)? {
        bound_memory(head.limits);
        watchdog.set(Some(Instant::now() + head.limits.time));
        let reply = session.answer(head.request, &body);
        watchdog.set(None);
        write_reply(&mut replies, &reply)?;
    }
    Ok(())
}

/// Limits the memory of the process. An allocation beyond the limit fails, which ends the process.
fn bound_memory(limits: Limits) {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let bound = |resource, most: u64| {
            let hard = getrlimit(resource).maximum;
            let most = hard.map_or(most, |hard| hard.min(most));
            // If the system has no such limit, the time limit still applies.
            let _ = setrlimit(
                resource,
                Rlimit {
                    current: Some(most),
                    maximum: hard,
                },
            );
        };
        // The limit counts writable memory; the program's own code and the mapped libraries do not
        // count.
        bound(Resource::Data, limits.bytes);
        // A process that aborts writes no core dump.
        bound(Resource::Core, 0);
    }
    #[cfg(not(unix))]
    let _ = limits;
}

/// A thread that ends the process if a request takes too long.
struct Watchdog {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    deadline: Option<Instant>,
    /// True if the thread wakes up by itself, not later than at the deadline of any request.
    awake: bool,
}

impl Watchdog {
    fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let watched = shared.clone();
        thread::Builder::new()
            .name("watchdog".into())
            .stack_size(1 << 16)
            .spawn(move || watched.watch())?;
        Ok(Self { shared })
    }

    fn set(&self, deadline: Option<Instant>) {
        let mut state = self
            .shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        state.deadline = deadline;
        // In a series of short requests, only one wakes the thread.
        if deadline.is_some() && !state.awake {
            self.shared.changed.notify_one();
        }
    }
}

impl Shared {
    /// The longest time until the thread wakes up. It is less than the shortest time limit of a
    /// request, so that the thread is in time for every deadline.
    const STEP: Duration = Duration::from_secs(1);

    fn watch(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let now = Instant::now();
            state.awake = state.deadline.is_some();
            state = match state.deadline {
                None => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) if now >= deadline => {
                    eprintln!("{TIMED_OUT}");
                    abort();
                }
                Some(deadline) => {
                    let time = (deadline - now).min(Self::STEP);
                    self.changed
                        .wait_timeout(state, time)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }
}
