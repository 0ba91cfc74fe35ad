//! A worker process, from within.

use std::io;
use std::process::{abort, exit};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::protocol::{Limits, read_request, write_reply};

/// The line that a worker writes before it ends itself because it took too long.
pub(super) const TIMED_OUT: &str = "marlin-text-worker: out of time";

/// Answers requests until there are no more.
pub(super) fn run() -> ! {
    // A panic is answered with its message.
    std::panic::set_hook(Box::new(|_| {}));
    exit(i32::from(answer_all().is_err()))
}

fn answer_all() -> io::Result<()> {
    let (mut requests, mut replies) = (io::stdin().lock(), io::stdout().lock());
    let (mut engine, watchdog) = (Engine::default(), Watchdog::start()?);
    while let Some((head, body)) = read_request(&mut requests)? {
        bound_memory(head.limits);
        watchdog.set(Some(Instant::now() + head.limits.time));
        let reply = engine.answer(head.request, &body);
        watchdog.set(None);
        write_reply(&mut replies, &reply)?;
    }
    Ok(())
}

/// Lets an allocation beyond the limit fail, which ends the process.
fn bound_memory(limits: Limits) {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let bound = |resource, most: u64| {
            let hard = getrlimit(resource).maximum;
            let most = hard.map_or(most, |hard| hard.min(most));
            // Where the system has no such limit, the one of time is left.
            let _ = setrlimit(
                resource,
                Rlimit {
                    current: Some(most),
                    maximum: hard,
                },
            );
        };
        // What is mapped to be written; the program's own text and the maps of its libraries do not
        // count.
        bound(Resource::Data, limits.bytes);
        // A process that ends itself leaves no image of its memory.
        bound(Resource::Core, 0);
    }
    #[cfg(not(unix))]
    let _ = limits;
}

/// A thread that ends the process where a request takes too long.
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
    /// True if the thread wakes up by itself, no later than any deadline.
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
        // Of many short requests in a row, one wakes it.
        if deadline.is_some() && !state.awake {
            self.shared.changed.notify_one();
        }
    }
}

impl Shared {
    /// The shortest time that a request may have: a thread that wakes up so often is in time for
    /// every deadline.
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
