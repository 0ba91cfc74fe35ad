//! Threads that share the iterations of a loop, ready within a microsecond of the loop before.
//!
//! A matmul of one row takes tens of microseconds. A sleeping thread takes as long to wake, and
//! rayon's scopes wait for a thread that they have woken even where nothing is left for it (on two
//! cores of an AMD EPYC a loop of rayon cost 40 us). So threads wait for the next loop awake, for a
//! short while, and a loop waits only for those that have begun an iteration.

use super::cores;
use std::any::Any;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize};
use std::sync::{Mutex, OnceLock, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// The time for which a thread stays awake for the next loop: longer than a model computes between
/// two matmuls of one row.
const AWAKE: Duration = Duration::from_micros(200);
/// Checks for a loop between two looks at the clock.
const CHECKS: usize = 64;

/// Runs `task` for `0..tasks` on at most `threads` threads, the calling one among them. Where
/// another thread runs a loop, the calling one runs all of this.
///
/// # Panics
/// Panics if a task does, when all threads have left the loop.
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

/// The machine's threads for loops: as many as rayon's, which a user can set.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// A loop's number, the helpers that it uses, whether it is open to them and how many are in it, in
/// one word.
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
    /// Held while a loop runs.
    busy: Mutex<()>,
    shared: &'static Shared,
    helpers: Vec<Helper>,
}

struct Shared {
    state: AtomicU64,
    /// The loop that is open: valid for those inside.
    current: AtomicPtr<Loop<'static>>,
    /// The core of the thread that ran the last loop; any number where it is not known.
    caller: AtomicUsize,
}

struct Helper {
    /// True if it has to be woken.
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
    /// Starts a helper for each thread but the caller's; fewer where the system has no more.
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
        // Sequentially consistent, as a helper's `asleep`: either it sees this loop before it
        // sleeps, or this thread sees it asleep.
        self.shared
            .state
            .store(State::open(number, helpers).0, SeqCst);
        for helper in &self.helpers[..helpers] {
            if helper.asleep.swap(false, SeqCst) {
                helper.thread.unpark();
            }
        }
        // SAFETY of the pointer: `run` catches a panic, so this function continues until no helper
        // is inside, and none enters a closed loop.
        shared_loop.run();
        self.shared.state.fetch_and(!State::OPEN, Relaxed);
        let mut checks = 0;
        while State(self.shared.state.load(Acquire)).inside() > 0 {
            checks += 1;
            // A helper that has lost its core needs this one.
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
    /// Runs a helper thread.
    fn help(&self, index: usize, asleep: &AtomicBool) {
        let mut last = 0;
        loop {
            let state = self.wait(index, asleep, last);
            if self
                .state
                .compare_exchange(state.0, state.0 + 1, Acquire, Relaxed)
                .is_err()
            {
                // Closed, or another helper entered: then look again.
                continue;
            }
            last = state.number();
            // SAFETY: the thread that opened the loop waits until this thread has left it.
            unsafe { &*self.current.load(Relaxed) }.run();
            self.state.fetch_sub(1, Release);
        }
    }

    /// Goes elsewhere from the caller's core, where this thread would run only while the caller
    /// does not. On busy machines Linux wakes it there, and leaves it for seconds beside an idle
    /// core.
    fn leave_caller(&self) {
        if let Some(core) = cores::current().filter(|&core| core == self.caller.load(Relaxed)) {
            cores::leave(core);
        }
    }

    /// Waits for a loop that uses this helper and is not the last one; awake, then asleep.
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
