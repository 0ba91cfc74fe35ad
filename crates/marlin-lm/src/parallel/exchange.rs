//! Sums and gathers over the ranks of a group, through the memory of the host.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn::tensor::{Tensor, TensorData};

use super::ParallelError;

/// The ranks of a split model, which exchange values.
///
/// All ranks exchange in the same order. What a rank gives lies in one of two buffers, by the
/// parity of the number of its exchanges. Nobody waits for the readers of a buffer: a rank fills
/// it again after one more exchange, to which the others have come only after they had read it.
#[derive(Debug)]
pub(crate) struct Group {
    /// The names of the devices, by rank.
    devices: Vec<String>,
    /// The longest time of a wait.
    timeout: Duration,
    state: Mutex<State>,
    /// Notified when a rank has given its values, and after a failure.
    changed: Condvar,
}

/// A time between two failures of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Session(u64);

#[derive(Debug)]
struct State {
    session: Session,
    /// The failure of this session.
    failure: Option<ParallelError>,
    /// The failure of the last session that failed.
    last_failure: Option<ParallelError>,
    /// The number of exchanges that each rank has begun.
    begun: Vec<usize>,
    buffers: [Buffer; 2],
}

/// What the ranks give in one exchange.
#[derive(Debug)]
struct Buffer {
    given: Vec<Option<Arc<Vec<f32>>>>,
    /// The number of ranks that have read.
    read: usize,
}

impl Buffer {
    fn new(count: usize) -> Self {
        Self {
            given: vec![None; count],
            read: 0,
        }
    }
}

impl Group {
    /// Creates a group of ranks with these devices, whose waits take `timeout` at most.
    pub(crate) fn new(devices: Vec<String>, timeout: Duration) -> Arc<Self> {
        let count = devices.len();
        Arc::new(Self {
            devices,
            timeout,
            state: Mutex::new(State {
                session: Session(0),
                failure: None,
                last_failure: None,
                begun: vec![0; count],
                buffers: [Buffer::new(count), Buffer::new(count)],
            }),
            changed: Condvar::new(),
        })
    }

    /// Returns the number of ranks.
    pub(crate) fn count(&self) -> usize {
        self.devices.len()
    }

    /// Returns the name of the device of a rank.
    pub(crate) fn device(&self, rank: usize) -> String {
        self.devices.get(rank).cloned().unwrap_or_default()
    }

    /// Returns the longest time of a wait.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the session that runs.
    pub(crate) fn session(&self) -> Session {
        self.lock().session
    }

    /// Ends the session with a failure, unless it has failed before, and wakes all ranks.
    pub(crate) fn fail(&self, failure: ParallelError) {
        self.fail_locked(&mut self.lock(), failure);
    }

    fn fail_locked(&self, state: &mut State, failure: ParallelError) {
        if state.failure.is_none() {
            tracing::error!(%failure, "a split model stops");
            state.last_failure = Some(failure.clone());
            state.failure = Some(failure);
        }
        self.changed.notify_all();
    }

    /// Returns the failure of the running session.
    pub(crate) fn failure(&self) -> Option<ParallelError> {
        self.lock().failure.clone()
    }

    /// Checks that a session runs and has not failed.
    ///
    /// # Errors
    /// The failure that ended it.
    pub(crate) fn check(&self, session: Session) -> Result<(), ParallelError> {
        let state = self.lock();
        let failure = match state.session == session {
            true => &state.failure,
            false => &state.last_failure,
        };
        failure.clone().map_or(Ok(()), Err)
    }

    /// Begins a new session after a failure. No rank may be within an exchange.
    pub(crate) fn reset(&self) {
        let (mut state, count) = (self.lock(), self.count());
        state.session.0 += 1;
        state.failure = None;
        state.begun = vec![0; count];
        state.buffers = [Buffer::new(count), Buffer::new(count)];
    }

    /// Gives the values of a rank, and returns those of all ranks; `None` after a failure.
    fn exchange(&self, rank: usize, values: Vec<f32>) -> Option<Vec<Arc<Vec<f32>>>> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.lock();
        if state.failure.is_some() {
            return None;
        }
        let parity = state.begun[rank] % 2;
        state.begun[rank] += 1;
        state.buffers[parity].given[rank] = Some(Arc::new(values));
        self.changed.notify_all();
        loop {
            if state.failure.is_some() {
                return None;
            }
            let given = &state.buffers[parity].given;
            let Some(missing) = given.iter().position(Option::is_none) else {
                break;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let failure = ParallelError::Late {
                    rank: missing,
                    device: self.device(missing),
                    waiting: rank,
                    waited: self.timeout,
                };
                self.fail_locked(&mut state, failure);
                return None;
            }
            let woken = self.changed.wait_timeout(state, left);
            (state, _) = woken.unwrap_or_else(PoisonError::into_inner);
        }
        let buffer = &mut state.buffers[parity];
        let all = buffer.given.iter().flatten().cloned().collect();
        buffer.read += 1;
        if buffer.read == self.count() {
            *buffer = Buffer::new(self.count());
        }
        Some(all)
    }

    /// Locks the state, also after a panic: it is changed by single assignments.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of one rank in the exchanges of its group.
#[derive(Debug, Clone)]
pub(crate) struct Communicator {
    group: Arc<Group>,
    rank: usize,
}

impl Communicator {
    pub(crate) fn new(group: Arc<Group>, rank: usize) -> Self {
        Self { group, rank }
    }

    /// Returns the group.
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// Reports an error of the device of this rank.
    pub(crate) fn fail(&self, reason: String) {
        self.group.fail(ParallelError::Device {
            rank: self.rank,
            device: self.group.device(self.rank),
            reason,
        });
    }

    /// Returns the sum of the tensors of all ranks (all-reduce), in the dtype of this rank's.
    ///
    /// Every rank adds in f32 in the order of ranks, so that all have the same bits. After a
    /// failure the result is `x`.
    pub(crate) fn sum<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let Some(all) = self.give(x.clone()) else {
            return x;
        };
        let mut parts = all.iter();
        let mut sum = parts.next().map_or_else(Vec::new, |first| first.to_vec());
        for part in parts {
            for (sum, value) in sum.iter_mut().zip(part.iter()) {
                *sum += value;
            }
        }
        let (shape, device, dtype) = (x.dims(), x.device(), x.dtype());
        Tensor::from_data(TensorData::new(sum, shape), (&device, dtype))
    }

    /// Returns the tensors of all ranks side by side along the last dimension (all-gather), which
    /// has `width` features together; ranks may have different numbers of them.
    ///
    /// After a failure the result is NaN.
    pub(crate) fn gather<const D: usize>(&self, x: Tensor<D>, width: usize) -> Tensor<D> {
        let (mut shape, device, dtype) = (x.dims(), x.device(), x.dtype());
        let own = shape[D - 1];
        shape[D - 1] = width;
        let rows = shape[..D - 1].iter().product::<usize>();
        let broken = || vec![f32::NAN; rows * width];
        // The parts of a failed rank could have another shape.
        let all = self.give(x).filter(|all| {
            let given: usize = all.iter().map(|part| part.len()).sum();
            given == rows * width && all[self.rank].len() == rows * own
        });
        let values = all.map_or_else(broken, |all| {
            let mut values = Vec::with_capacity(rows * width);
            for row in 0..rows {
                for part in &all {
                    let of_row = part.len() / rows;
                    values.extend_from_slice(&part[row * of_row..][..of_row]);
                }
            }
            values
        });
        Tensor::from_data(TensorData::new(values, shape), (&device, dtype))
    }

    /// Gives the values of a tensor, and returns those of all ranks; `None` after a failure.
    fn give<const D: usize>(&self, x: Tensor<D>) -> Option<Vec<Arc<Vec<f32>>>> {
        if self.group.failure().is_some() {
            return None;
        }
        match x.try_into_vec_as::<f32>() {
            Ok(values) => self.group.exchange(self.rank, values),
            Err(error) => {
                self.fail(error.to_string());
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
