//! The workspaces of the tensor-core kernel: one for each stream of each device, made at its first launch and kept.

use burn_cubecl::CubeDevice;
use burn_fusion::stream::StreamId;
use cubecl::client::Client;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use marlin_kernels::marlin::{Card, Workspace};
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

static WORKSPACES: LazyLock<Mutex<HashMap<(CubeDevice, u64), Workspace>>> = LazyLock::new(Mutex::default);

/// The workspace for a launch on the current stream.
///
/// CubeCL maps its logical streams, one for each thread, to a bounded number of streams of the device. Launches on one of those follow each
/// other, so they share a workspace, and threads that come and go leave nothing behind.
pub(super) fn workspace(client: &Client, device: &CubeDevice, card: &Card) -> Workspace {
    let streams = u64::from(CubeClRuntimeConfig::get().streaming.max_streams).max(1);
    let stream = StreamId::current().value % streams;
    // A panic elsewhere leaves the map whole: an entry is there or it is not.
    let mut workspaces = WORKSPACES.lock().unwrap_or_else(PoisonError::into_inner);
    workspaces.entry((device.clone(), stream)).or_insert_with(|| Workspace::new(client, card)).clone()
}
