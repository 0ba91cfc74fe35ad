//! Kernels of a recorded pass that overlap: programmatic dependent launch (CUDA C++ Programming
//! Guide, "Programmatic Dependent Launch and Synchronization").
//!
//! In a graph a kernel starts when the kernel before it has ended and its writes are visible. On a
//! programmatic edge it may start as soon as every block of the kernel before has executed
//! `griddepcontrol.launch_dependents` or has exited, and then does by itself what does not depend
//! on that one, until `griddepcontrol.wait` has seen it end:
//!
//! ```text
//! ordinary edges       | kernel 1        |launch| kernel 2        |launch|
//! programmatic edges   | kernel 1        |
//!                        | launch, weights .. wait | kernel 2     |
//! ```
//!
//! A kernel that takes part [begins](start_next()) by letting the next start, and [waits](wait())
//! in every block, before it reads or writes anything that a pass writes. What it reads before must
//! not change in a pass: weights, tables. After its launch the host calls [`follow`].
//!
//! CubeCL launches without the attribute that makes an edge programmatic. `driver.rs` changes the
//! edge in the graph while it is recorded; where that fails the edge stays as it was, and the
//! instructions do nothing.

#[cfg(feature = "cuda")]
mod driver;

use crate::{Card, ptx};
use cubecl::client::Client;
use cubecl::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// The compute capability from which on kernels overlap, 90 for 9.0.
const MIN_CAPABILITY: u32 = 90;

/// False where [`record_ordinary_edges`] was called.
static PROGRAMMATIC: AtomicBool = AtomicBool::new(true);

/// Returns true if kernels for a client's device have the instructions.
pub fn is_supported(client: &Client) -> bool {
    Card::of(client).is_some_and(|card| is_supported_by(card.capability))
}

/// Returns true if cards of a compute capability, 90 for 9.0, have them.
pub const fn is_supported_by(capability: u32) -> bool {
    capability >= MIN_CAPABILITY
}

/// Records ordinary edges from here on (true), or programmatic ones where the device has them: to
/// compare the two. For the whole process.
pub fn record_ordinary_edges(ordinary: bool) {
    PROGRAMMATIC.store(!ordinary, Ordering::Relaxed);
}

/// Lets the kernel that this thread launched last overlap the one before it, if a graph is being
/// recorded. The kernel must [`wait()`].
///
/// If the driver refuses, the kernel starts after the one before; the first time the reason is
/// logged.
pub fn follow(client: &Client) {
    #[cfg(feature = "cuda")]
    if client.is_capturing() && PROGRAMMATIC.load(Ordering::Relaxed) && is_supported(client) {
        static REFUSED: std::sync::Once = std::sync::Once::new();
        if let Err(error) = driver::make_last_edge_programmatic(client) {
            REFUSED
                .call_once(|| tracing::info!(%error, "kernels of recorded passes do not overlap"));
        }
    }
    #[cfg(not(feature = "cuda"))]
    let _ = client;
}

/// Lets the next kernel start once every block has come here, if the kernel `overlaps`.
#[cube]
pub fn start_next(#[comptime] overlaps: bool) {
    if overlaps {
        ptx::griddepcontrol_launch_dependents();
    }
}

/// Waits until the kernels before have ended and their writes are visible, if the kernel
/// `overlaps`.
#[cube]
pub fn wait(#[comptime] overlaps: bool) {
    if overlaps {
        ptx::griddepcontrol_wait();
    }
}

/// [`start_next()`] and [`wait()`]: for a kernel that reads nothing before.
#[cube]
pub fn start_next_and_wait(#[comptime] overlaps: bool) {
    start_next(overlaps);
    wait(overlaps);
}
