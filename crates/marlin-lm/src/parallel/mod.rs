//! Tensor parallelism: a model that is split over several devices of one process.
//!
//! Each rank has some heads of attention, some features of each feed-forward network and some
//! tokens of the output head ([`Shard`]). The outputs of the layers that are split by rows of K are
//! summed over the ranks, and the logits of all ranks are gathered ([`Communicator`]), so that
//! every rank chooses the same tokens from the same bits. Rank 0 runs on the thread of the caller,
//! every other rank on a thread of its own ([`Ranks`]).

mod devices;
mod error;
mod exchange;
mod groups;
mod random;
mod ranks;
mod shard;
mod split;

use std::sync::Arc;
use std::time::Duration;

pub(crate) use devices::check_devices;
pub use error::ParallelError;
pub(crate) use exchange::{Communicator, Group, Session};
pub(crate) use groups::RowGroups;
pub(crate) use ranks::{RankState, Ranks, panic_message};
pub(crate) use shard::{Shard, check_heads};

use crate::model::Model;

/// The longest time that a rank waits for another, by default.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// What the model of a rank knows of the others.
#[derive(Debug, Clone)]
pub(crate) struct Parallel {
    pub(crate) communicator: Communicator,
    /// The threads of the other ranks; `None` in the model of such a thread.
    pub(crate) ranks: Option<Arc<Ranks>>,
    /// True if the memory of the devices is that of the host, which the ranks share.
    pub(crate) is_host: bool,
}

/// Connects the models of all ranks, whose waits take `timeout` at most. Returns the model of rank
/// 0; the others move to threads of their own. A single model is returned as it is.
///
/// # Errors
/// [`ParallelError::NoDevices`] without a model, [`ParallelError::Thread`].
pub(crate) fn connect(models: Vec<Model>, timeout: Duration) -> Result<Model, ParallelError> {
    let devices: Vec<_> = models.iter().map(Model::device).collect();
    let is_host = devices.iter().all(burn_marlin::device::is_host);
    let names = devices.iter().map(burn_marlin::device::device_name);
    let group = Group::new(names.collect(), timeout);
    let mut models = models.into_iter().enumerate().map(|(rank, model)| {
        let communicator = Communicator::new(group.clone(), rank);
        model.with_parallel(Parallel {
            communicator,
            ranks: None,
            is_host,
        })
    });
    let Some(root) = models.next() else {
        return Err(ParallelError::NoDevices);
    };
    let others: Vec<Model> = models.collect();
    if others.is_empty() {
        return Ok(root.without_parallel());
    }
    if !is_host {
        tracing::warn!(
            ranks = group.count(),
            "the sums of a split model go through the memory of the host, which is slow"
        );
    }
    let ranks = Arc::new(Ranks::start(group.clone(), others)?);
    Ok(root.with_parallel(Parallel {
        communicator: Communicator::new(group, 0),
        ranks: Some(ranks),
        is_host,
    }))
}
