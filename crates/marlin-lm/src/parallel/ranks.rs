//! The threads of the ranks of a split model.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{Group, ParallelError, Session};
use crate::model::Model;

/// The time between two looks at a thread that ends.
const END_POLL: Duration = Duration::from_millis(1);

/// Work for the thread of a rank.
type Command = Box<dyn FnOnce(&mut RankState) + Send>;

/// What the thread of a rank has: its part of the model, and what commands keep for later ones.
pub(crate) struct RankState {
    pub(crate) model: Arc<Model>,
    /// Values that commands keep, by the id of their owner on rank 0.
    kept: HashMap<u64, Box<dyn Any + Send>>,
}

impl RankState {
    /// Keeps a value for later commands.
    pub(crate) fn keep<T: Any + Send>(&mut self, id: u64, value: T) {
        self.kept.insert(id, Box::new(value));
    }

    /// Returns the model, and a value that an earlier command has kept.
    pub(crate) fn kept<T: Any>(&mut self, id: u64) -> Option<(&Arc<Model>, &mut T)> {
        let value = self.kept.get_mut(&id)?.downcast_mut()?;
        Some((&self.model, value))
    }
}

/// The threads of the ranks of a split model other than rank 0.
///
/// Commands run on each thread in the order in which they are sent. Work with exchanges is sent to
/// all ranks and run on rank 0 within one [turn](Self::run), so that all ranks have the same order
/// of exchanges whatever the number of threads that use the model.
pub(crate) struct Ranks {
    group: Arc<Group>,
    peers: Vec<Peer>,
    turn: Mutex<()>,
    next_id: AtomicU64,
}

/// The thread of a rank.
struct Peer {
    rank: usize,
    /// `None` while the thread is being ended.
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl Peer {
    /// Gives a command to the thread. The thread ends only when its sender is dropped.
    fn send(&self, command: Command) {
        if let Some(commands) = &self.commands {
            // Without a thread the others would report that the rank is late.
            drop(commands.send(command));
        }
    }
}

impl Ranks {
    /// Starts a thread for each model, of rank 1 and the ranks after it.
    ///
    /// # Errors
    /// [`ParallelError::Thread`].
    pub(super) fn start(group: Arc<Group>, models: Vec<Model>) -> Result<Self, ParallelError> {
        let mut ranks = Self {
            group,
            peers: Vec::new(),
            turn: Mutex::new(()),
            next_id: AtomicU64::new(0),
        };
        for (rank, model) in (1..).zip(models) {
            let (commands, received) = channel();
            let group = ranks.group.clone();
            let thread = thread::Builder::new().name(format!("marlin rank {rank}"));
            let thread = thread.spawn(move || run_rank(&group, rank, model, received));
            let thread = thread.map_err(|error| ParallelError::Thread {
                rank,
                reason: error.to_string(),
            })?;
            ranks.peers.push(Peer {
                rank,
                commands: Some(commands),
                thread: Some(thread),
            });
        }
        Ok(ranks)
    }

    /// Returns the group of all ranks.
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Returns an id under which the ranks keep values of one owner.
    pub(crate) fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the running session, in which something new can begin. After a failure, waits until
    /// all ranks are idle, and begins a new session.
    ///
    /// # Errors
    /// [`ParallelError::Busy`] if a rank is not idle in time.
    pub(crate) fn session(&self) -> Result<Session, ParallelError> {
        let _turn = self.turn();
        if self.group.failure().is_some() {
            self.wait(|_| ())?;
            self.group.reset();
        }
        Ok(self.group.session())
    }

    /// Runs `root` on this thread, and `command` on the threads of all other ranks, beside it.
    ///
    /// # Errors
    /// The failure that ended the session before; then nothing runs.
    pub(crate) fn run<T>(
        &self,
        session: Session,
        command: impl FnOnce(&mut RankState) + Clone + Send + 'static,
        root: impl FnOnce() -> T,
    ) -> Result<T, ParallelError> {
        let _turn = self.turn();
        self.group.check(session)?;
        for peer in &self.peers {
            peer.send(Box::new(command.clone()));
        }
        let failing = FailWhilePanicking(&self.group);
        let result = root();
        drop(failing);
        Ok(result)
    }

    /// Asks every rank but the first, and returns the answers by rank.
    ///
    /// # Errors
    /// The failure that ended the session, and [`ParallelError::Busy`] for a rank that does not
    /// answer in time.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        session: Session,
        question: impl FnOnce(&mut RankState) -> T + Clone + Send + 'static,
    ) -> Result<Vec<T>, ParallelError> {
        let _turn = self.turn();
        self.group.check(session)?;
        let answers = self.wait(question)?;
        self.group.check(session)?;
        Ok(answers)
    }

    /// Removes what commands have kept under an id.
    pub(crate) fn forget(&self, id: u64) {
        for peer in &self.peers {
            peer.send(Box::new(move |state: &mut RankState| {
                drop(state.kept.remove(&id))
            }));
        }
    }

    /// Waits for the answers of all ranks but the first, which come after all earlier commands.
    fn wait<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut RankState) -> T + Clone + Send + 'static,
    ) -> Result<Vec<T>, ParallelError> {
        let asked = |peer: &Peer| {
            let (sender, answer) = channel();
            let question = question.clone();
            peer.send(Box::new(move |state: &mut RankState| {
                // The caller may have ceased to wait.
                drop(sender.send(question(state)));
            }));
            answer
        };
        let answers: Vec<Receiver<T>> = self.peers.iter().map(asked).collect();
        let waited = self.group.timeout();
        let deadline = Instant::now() + waited;
        let answer_of = |(answer, peer): (&Receiver<T>, &Peer)| {
            let left = deadline.saturating_duration_since(Instant::now());
            answer.recv_timeout(left).map_err(|error| match error {
                RecvTimeoutError::Timeout => ParallelError::Busy {
                    rank: peer.rank,
                    device: self.group.device(peer.rank),
                    waited,
                },
                // The question panicked, which is a failure of the group.
                RecvTimeoutError::Disconnected => self
                    .group
                    .failure()
                    .unwrap_or(ParallelError::Stopped { rank: peer.rank }),
            })
        };
        answers.iter().zip(&self.peers).map(answer_of).collect()
    }

    /// Waits for the turn of this thread. A turn is bounded, since every wait within it is.
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ranks {
    /// Ends the threads, and waits for them as long as for an exchange: a device that hangs keeps
    /// its thread, and not this one.
    fn drop(&mut self) {
        for peer in &mut self.peers {
            peer.commands = None;
        }
        let deadline = Instant::now() + self.group.timeout();
        for peer in &mut self.peers {
            let Some(thread) = peer.thread.take() else {
                continue;
            };
            while !thread.is_finished() && Instant::now() < deadline {
                thread::sleep(END_POLL);
            }
            if thread.is_finished() {
                drop(thread.join());
            }
        }
    }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranks = f.debug_struct("Ranks");
        ranks.field("count", &self.group.count()).finish()
    }
}

/// Fails a group when rank 0 unwinds, so that the other ranks do not wait for it.
struct FailWhilePanicking<'a>(&'a Group);

impl Drop for FailWhilePanicking<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail(ParallelError::Panicked {
                rank: 0,
                device: self.0.device(0),
                reason: "see its own message".into(),
            });
        }
    }
}

/// Runs the commands of a rank on the stream of its weights until the sender is dropped.
fn run_rank(group: &Group, rank: usize, model: Model, commands: Receiver<Command>) {
    let stream = model.stream();
    let mut state = RankState {
        model: Arc::new(model),
        kept: HashMap::new(),
    };
    stream.executes(|| {
        for command in commands {
            let ran = catch_unwind(AssertUnwindSafe(|| command(&mut state)));
            if let Err(payload) = ran {
                group.fail(ParallelError::Panicked {
                    rank,
                    device: group.device(rank),
                    reason: panic_message(&*payload),
                });
            }
        }
    });
}

/// Returns the message of a panic.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "without a message".into())
}
