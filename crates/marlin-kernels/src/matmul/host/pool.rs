//! A pool of threads that share the iterations of a loop, and are ready for the next loop within a
//! microsecond.
//!
//! A matmul of one row takes tens of microseconds. A sleeping thread takes as long to wake, and a
//! rayon scope waits for the threads that it has woken even if no work is left for them (on two
//! cores of an AMD EPYC a rayon loop cost 40 us). Threads of this pool therefore stay awake for a
//! short time to wait for the next loop, and a loop waits only for threads that have entered it.

use super::cores;
use std::any::Any;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize};
use std::sync::{Mutex, OnceLock, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// The time for which a thread stays awake to wait for the next loop: longer than the time between
/// two matmuls of one row in a model.
const AWAKE: Duration = Duration::from_micros(200);
/// Number of checks for a new loop between two reads of the clock.
const CHECKS: usize = 64;

/// Runs `task` for `0..tasks` on at most `threads` threads, including the calling thread. If
/// another thread is running a loop, the calling thread runs all iterations itself.
///
/// # Panics
/// Panics if a task panics, after all threads have left the loop.
pub fn for_each(tasks: usize, threads: usize, task: &(dyn Fn(usize) + Sync)) {
    static POOL: OnceLock<Pool> = OnceLock::new();
    if threads.min(tasks) > 1 {
        let pool = POOL.get_or_init(Pool::start);
        let guard = match pool.busy.try_lock() {
            Ok(guard) => Some(guard),
            // A task of an earlier loop panicked.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if guard.is_some() {
            return pool.run(tasks, threads.min(tasks) - 1, task);
        }
    }
    (0..tasks).for_each(task);
}

/// Returns the number of threads for loops. It is rayon's number of threads, which users can set.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// The state of a loop in one word: its number, the number of helpers that it uses, whether it is
/// open to helpers, and how many helpers are inside it.
#[derive(Clone, Copy, PartialEq)]
struct State(u64);

impl State {
    const OPEN: u64 = 1 << 16;

    fn open(number: u32, helpers: usize) -> Self {
        Self(u64::from(number) << 32 | (helpers as u64) << 17 | Self::OPEN)
    }

    fn number(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn is_for(self, helper: usize) -> bool {
        self.0 & Self::OPEN != 0 && helper < (self.0 >> 17 & 0x7fff) as usize
    }

    fn inside(self) -> u64 {
        self.0 & 0xffff
    }
}

struct Pool {
    /// The lock that is held while a loop runs.
    busy: Mutex<()>,
    shared: &'static Shared,
    helpers: Vec<Helper>,
}

struct Shared {
    state: AtomicU64,
    /// The open loop. The pointer is valid for threads inside the loop.
    current: AtomicPtr<Loop<'static>>,
    /// The core of the thread that ran the last loop; `usize::MAX` if it is not known.
    caller: AtomicUsize,
}

struct Helper {
    /// True if the thread has to be woken.
    asleep: &'static AtomicBool,
    thread: Thread,
}

struct Loop<'a> {
    task: &'a (dyn Fn(usize) + Sync),
    tasks: usize,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Loop<'_> {
    /// Runs iterations until none are left.
    fn run(&self) {
        let iterations = || {
            loop {
                let index = self.next.fetch_add(1, Relaxed);
                if index >= self.tasks {
                    break;
                }
                (self.task)(index);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(iterations)) {
            self.next.store(self.tasks, Relaxed);
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
    }
}

impl Pool {
    /// Starts a helper for each thread except the caller's; fewer if the system cannot start more.
    fn start() -> Self {
        let (state, current, caller) = (
            AtomicU64::new(0),
            AtomicPtr::new(std::ptr::null_mut()),
            AtomicUsize::new(usize::MAX),
        );
        let shared: &Shared = Box::leak(Box::new(Shared {
            state,
            current,
            caller,
        }));
        let start = |index: usize| {
            let asleep: &AtomicBool = Box::leak(Box::default());
            let thread = thread::Builder::new()
                .name(format!("marlin-host-{index}"))
                .spawn(move || shared.help(index, asleep))
                .ok()?;
            Some(Helper {
                asleep,
                thread: thread.thread().clone(),
            })
        };
        Self {
            busy: Mutex::new(()),
            shared,
            helpers: (0..threads().clamp(1, 0x7fff) - 1)
                .map_while(start)
                .collect(),
        }
    }

    fn run(&self, tasks: usize, helpers: usize, task: &(dyn Fn(usize) + Sync)) {
        let mut shared_loop = Loop {
            task,
            tasks,
            next: AtomicUsize::new(0),
            panic: Mutex::new(None),
        };
        let helpers = helpers.min(self.helpers.len());
        self.shared
            .current
            .store(std::ptr::from_mut(&mut shared_loop).cast(), Relaxed);
        self.shared
            .caller
            .store(cores::current().unwrap_or(usize::MAX), Relaxed);
        let number = State(self.shared.state.load(Relaxed))
            .number()
            .wrapping_add(1);
        // The store is sequentially consistent, as is a helper's store to `asleep`: either the
        // helper sees this loop before it sleeps, or this thread sees that the helper is asleep.
        self.shared
            .state
            .store(State::open(number, helpers).0, SeqCst);
        for helper in &self.helpers[..helpers] {
            if helper.asleep.swap(false, SeqCst) {
                helper.thread.unpark();
            }
        }
        // SAFETY of the pointer: `run` catches a panic, so this function continues until no helper
        // is inside, and no helper enters a closed loop.
        shared_loop.run();
        self.shared.state.fetch_and(!State::OPEN, Relaxed);
        let mut checks = 0;
        while State(self.shared.state.load(Acquire)).inside() > 0 {
            checks += 1;
            // A helper that was descheduled may need this core.
            if checks % 4096 == 0 {
                thread::yield_now()
            } else {
                spin_loop()
            }
        }
        if let Some(panic) = shared_loop
            .panic
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
        {
            resume_unwind(panic);
        }
    }
}

impl Shared {
    /// Runs the main loop of a helper thread.
    fn help(&self, index: usize, asleep: &AtomicBool) {
        let mut last = 0;
        loop {
            let state = self.wait(index, asleep, last);
            if self
                .state
                .compare_exchange(state.0, state.0 + 1, Acquire, Relaxed)
                .is_err()
            {
                // The loop was closed, or another helper entered it: read the state again.
                continue;
            }
            last = state.number();
            // SAFETY: the thread that opened the loop waits until this thread has left it.
            unsafe { &*self.current.load(Relaxed) }.run();
            self.state.fetch_sub(1, Release);
        }
    }

    /// Moves this thread off the caller's core, where it would run only while the caller does not.
    /// On busy machines Linux wakes a helper on the caller's core, and leaves it there for seconds
    /// although another core is idle.
    fn leave_caller(&self) {
        if let Some(core) = cores::current().filter(|&core| core == self.caller.load(Relaxed)) {
            cores::move_off(core);
        }
    }

    /// Waits for a loop that uses this helper and is not loop `last`: first by spinning, then
    /// asleep.
    fn wait(&self, index: usize, asleep: &AtomicBool, last: u32) -> State {
        let wanted = |state: State| state.number() != last && state.is_for(index);
        loop {
            let start = Instant::now();
            while start.elapsed() < AWAKE {
                for _ in 0..CHECKS {
                    let state = State(self.state.load(Relaxed));
                    if wanted(state) {
                        return state;
                    }
                    spin_loop();
                }
                self.leave_caller();
            }
            asleep.store(true, SeqCst);
            if !wanted(State(self.state.load(SeqCst))) {
                thread::park();
            }
            asleep.store(false, Relaxed);
        }
    }
}
