//! The errors of models that are split over several devices.

use std::time::Duration;

use marlin_format::{FormatError, JoinError};

/// A model that cannot be split over several devices, or a device of a split model that failed.
///
/// Devices are counted by their rank, from 0, in the order in which they were given.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// An empty list of devices.
    #[error("no device was given; a model needs at least one")]
    NoDevices,
    /// A card that was given twice. Only devices whose memory is that of the host may be repeated.
    #[error("ranks {first} and {second} are the same device, {device}; give each card once")]
    SameDevice {
        /// The device.
        device: String,
        /// The first rank that has the device.
        first: usize,
        /// The second rank that has the device.
        second: usize,
    },
    /// Devices of different kinds, whose kernels differ.
    #[error(
        "rank {rank} is {found}, and rank 0 is {expected}; the devices of a model are of one kind"
    )]
    OtherDevice {
        /// The rank of the device that differs.
        rank: usize,
        /// The device of rank 0.
        expected: String,
        /// The device of this rank.
        found: String,
    },
    /// A number of devices that does not divide the query heads.
    #[error(
        "{heads} query heads cannot be split evenly over {count} devices; numbers that fit: {}",
        list(.fitting)
    )]
    Heads {
        /// The number of query heads.
        heads: usize,
        /// The number of devices.
        count: usize,
        /// The numbers of devices that fit the heads.
        fitting: Vec<usize>,
    },
    /// A number of devices that neither divides the key and value heads nor is a multiple of them.
    #[error(
        "{kv_heads} key and value heads cannot be split evenly over {count} devices, nor repeated; numbers that fit: {}",
        list(.fitting)
    )]
    KeyValueHeads {
        /// The number of key and value heads.
        kv_heads: usize,
        /// The number of devices.
        count: usize,
        /// The numbers of devices that fit the heads.
        fitting: Vec<usize>,
    },
    /// A layer with fewer groups along K, or fewer features, than there are devices.
    #[error(
        "`{layer}` has {groups} groups of {rows} features to split, fewer than {count} devices; give at most {groups}"
    )]
    Groups {
        /// The name of the layer.
        layer: String,
        /// The number of groups.
        groups: usize,
        /// The number of features of a group.
        rows: usize,
        /// The number of devices.
        count: usize,
    },
    /// A layer with a group of rows of K that two devices would share.
    #[error(
        "rank {rank} of {count} begins at row {row} of `{layer}`, within a group of {group} rows; give fewer devices, or a model with smaller groups"
    )]
    Border {
        /// The name of the layer.
        layer: String,
        /// The rank.
        rank: usize,
        /// The number of devices.
        count: usize,
        /// The first row of K of the rank.
        row: usize,
        /// The number of rows of a group.
        group: usize,
    },
    /// A layer whose weight cannot be split: one with act-order has rows of every group in each
    /// part.
    #[error("`{layer}` cannot be split over devices")]
    Slice {
        /// The name of the layer.
        layer: String,
        /// The cause.
        source: FormatError,
    },
    /// A layer with several outputs whose parts on one rank cannot be joined.
    #[error("the parts of `{layer}` that one device has cannot be joined")]
    Join {
        /// The name of the layer.
        layer: String,
        /// The cause.
        source: JoinError,
    },
    /// A device without room for its part of a model.
    #[error(
        "the part of rank {rank} ({device}) takes {weights} bytes, and a cache of {positions} positions {cache}; {free} are free: give more devices, or a smaller `max_len`"
    )]
    Memory {
        /// The rank.
        rank: usize,
        /// The device.
        device: String,
        /// The bytes of the weights of the rank while they are loaded; of all ranks, if their
        /// memory is that of the host.
        weights: usize,
        /// The number of positions of the cache.
        positions: usize,
        /// The bytes of the cache of one sequence and of the rotary tables.
        cache: usize,
        /// The free bytes of the device.
        free: usize,
    },
    /// A device that did not arrive at an exchange in time.
    #[error("rank {rank} ({device}) was not ready within {} s, and rank {waiting} waited for it", .waited.as_secs_f64())]
    Late {
        /// The rank that was late.
        rank: usize,
        /// The device of that rank.
        device: String,
        /// The rank that waited.
        waiting: usize,
        /// The longest time of a wait.
        waited: Duration,
    },
    /// A thread of a device that panicked.
    #[error("the thread of rank {rank} ({device}) panicked: {reason}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// The device of the rank.
        device: String,
        /// The message of the panic.
        reason: String,
    },
    /// A device that reported an error.
    #[error("rank {rank} ({device}) failed: {reason}")]
    Device {
        /// The rank.
        rank: usize,
        /// The device of the rank.
        device: String,
        /// The error of the device.
        reason: String,
    },
    /// A device that is still at work after another one failed, so that nothing new can begin.
    #[error("rank {rank} ({device}) is still at work {} s after a failure; try again later", .waited.as_secs_f64())]
    Busy {
        /// The rank.
        rank: usize,
        /// The device of the rank.
        device: String,
        /// The time that was waited.
        waited: Duration,
    },
    /// A thread that the system did not start.
    #[error("no thread for rank {rank}: {reason}")]
    Thread {
        /// The rank.
        rank: usize,
        /// The error of the system.
        reason: String,
    },
    /// A rank that stopped loading since another rank had failed.
    #[error("rank {rank} stopped, since another rank failed")]
    Stopped {
        /// The rank.
        rank: usize,
    },
    /// A split model where a whole one is needed: one that is saved.
    #[error(
        "the model is split over {count} devices, and only a whole model can be saved; open it on one device"
    )]
    NotWhole {
        /// The number of devices.
        count: usize,
    },
}

/// Writes numbers with commas.
fn list(numbers: &[usize]) -> String {
    let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
    numbers.join(", ")
}
