use super::candidates::any_format;
use super::config::Config;
use super::exchange::{FLAGS_BYTES, MAX_BLOCKS};
use crate::problem::expect_at_least;
use crate::{Card, KernelError};
use cubecl::client::Client;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::device::DeviceId;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_environment::stream::StreamId;
use std::any::TypeId;
use std::collections::HashMap;
use std::fmt;
use std::sync::{LazyLock, Mutex, PoisonError};

/// The memory in which blocks that share an output tile store their sums (`exchange.rs`): one area
/// for sums with marks, one for sums under flags.
///
/// Marks and flags are zero between launches, because the block that reads one clears it. A
/// workspace is therefore cleared only once, when it is created. It belongs to one stream: two
/// launches that may run at the same time need separate workspaces.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    marked: Area,
    flagged: Area,
}

#[derive(Debug, Clone)]
struct Area {
    handle: Handle,
    words: usize,
}

/// The key of a workspace: a device, the type of its CubeCL server, and a stream of the device.
type Stream = (DeviceId, TypeId, u64);

static WORKSPACES: LazyLock<Mutex<HashMap<Stream, Workspace>>> = LazyLock::new(Mutex::default);

impl Workspace {
    /// Returns the workspace of the current stream, which is created at the stream's first launch
    /// and kept.
    ///
    /// CubeCL maps its logical streams, one for each thread, to a bounded number of device streams.
    /// Launches on the same device stream run one after the other, so they share a workspace, and
    /// threads that end leave no workspace behind.
    pub fn of_stream(client: &Client, card: &Card) -> Self {
        let streams = u64::from(CubeClRuntimeConfig::get().streaming.max_streams).max(1);
        let server = client.service_id();
        let stream = (
            server.device,
            server.service,
            StreamId::current().value % streams,
        );
        // A panic in another thread leaves the map valid: an entry is either inserted or not.
        let mut workspaces = WORKSPACES.lock().unwrap_or_else(PoisonError::into_inner);
        workspaces
            .entry(stream)
            .or_insert_with(|| Self::new(client, card))
            .clone()
    }

    /// Creates a workspace that is large enough for every launch on `card`.
    fn new(client: &Client, card: &Card) -> Self {
        let blocks = card.multiprocessors.min(MAX_BLOCKS);
        let area = |flagged| {
            let configs =
                any_format(card.capability).filter(|config| config.is_flagged() == flagged);
            let words = configs
                .map(|config| words(&config, blocks))
                .max()
                .unwrap_or(0);
            Area {
                handle: client.create_from_slice(&vec![0; words * size_of::<u64>()]),
                words,
            }
        };
        Self {
            marked: area(false),
            flagged: area(true),
        }
    }

    /// Returns the area that `blocks` blocks of a configuration use. An area that is too small is
    /// an error.
    pub fn area(
        self,
        problem: &impl fmt::Display,
        config: &Config,
        blocks: usize,
    ) -> Result<BufferArg, KernelError> {
        let Area {
            handle,
            words: found,
        } = if config.is_flagged() {
            self.flagged
        } else {
            self.marked
        };
        expect_at_least(problem, "workspace", words(config, blocks), found)?;
        // SAFETY: the area was allocated with that many words.
        Ok(unsafe { BufferArg::from_raw_parts(handle, found) })
    }
}

/// Returns the number of 64-bit words in which `blocks` blocks exchange their sums.
fn words(config: &Config, blocks: usize) -> usize {
    let flags = if config.is_flagged() { FLAGS_BYTES } else { 0 };
    (flags + blocks * config.partial_bytes()).div_ceil(size_of::<u64>())
}
