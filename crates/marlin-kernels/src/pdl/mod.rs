//! Programmatic dependent launch: kernels of a recorded pass that overlap (CUDA C++ Programming
//! Guide, "Programmatic Dependent Launch and Synchronization").
//!
//! In a graph, a kernel starts when the preceding kernel has ended and its writes are visible. With
//! a programmatic edge it may start as soon as every block of the preceding kernel has executed
//! `griddepcontrol.launch_dependents` or has exited. It then does the work that does not depend on
//! the preceding kernel, and waits for the end of that kernel with `griddepcontrol.wait`:
//!
//! ```text
//! ordinary edges       | kernel 1        |launch| kernel 2        |launch|
//! programmatic edges   | kernel 1        |
//!                        | launch, weights .. wait | kernel 2     |
//! ```
//!
//! A kernel that takes part [begins](launch_dependents()) by letting the next kernel start, and
//! [waits](wait()) in every block before it reads or writes any data that a pass writes. Data that
//! it reads before the wait, such as weights and tables, must not change in a pass. After its
//! launch the host calls [`make_edge_programmatic`].
//!
//! CubeCL launches without the attribute that makes an edge programmatic. `driver.rs` changes the
//! edge in the graph while the graph is recorded. If this fails the edge stays an ordinary edge,
//! and the instructions have no effect.

#[cfg(feature = "cuda")]
mod driver;

use crate::{Target, ptx};
use cubecl::client::Client;
use cubecl::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// The first compute capability with programmatic dependent launch, 90 for 9.0.
const MIN_CAPABILITY: u32 = 90;

/// True if graphs are recorded with programmatic edges; see [`record_ordinary_edges`].
static PROGRAMMATIC: AtomicBool = AtomicBool::new(true);

/// Returns true if a device supports programmatic dependent launch.
pub fn is_supported(target: &Target) -> bool {
    is_supported_by(target.capability())
}

/// Returns true if cards of a compute capability, 90 for 9.0, support programmatic dependent
/// launch.
pub const fn is_supported_by(capability: u32) -> bool {
    capability >= MIN_CAPABILITY
}

/// Selects whether graphs are recorded with ordinary edges from now on (true), or with programmatic
/// edges if the device supports them (false). The setting is for comparisons, and holds for the
/// whole process.
pub fn record_ordinary_edges(ordinary: bool) {
    PROGRAMMATIC.store(!ordinary, Ordering::Relaxed);
}

/// Lets the kernel that this thread launched last overlap the preceding kernel, if a graph is being
/// recorded. The kernel must [`wait()`].
///
/// If the driver refuses, the kernel starts after the preceding kernel has ended; the first time,
/// the reason is logged.
pub fn make_edge_programmatic(client: &Client) {
    #[cfg(feature = "cuda")]
    if client.is_capturing()
        && PROGRAMMATIC.load(Ordering::Relaxed)
        && is_supported(&Target::of(client))
    {
        static REFUSED: std::sync::Once = std::sync::Once::new();
        if let Err(error) = driver::make_last_edge_programmatic(client) {
            REFUSED
                .call_once(|| tracing::info!(%error, "kernels of recorded passes do not overlap"));
        }
    }
    #[cfg(not(feature = "cuda"))]
    let _ = client;
}

/// Lets the next kernel start once every block has called this function, if the kernel `uses_pdl`.
#[cube]
pub fn launch_dependents(#[comptime] uses_pdl: bool) {
    if uses_pdl {
        ptx::griddepcontrol_launch_dependents();
    }
}

/// Waits until the preceding kernels have ended and their writes are visible, if the kernel
/// `uses_pdl`.
#[cube]
pub fn wait(#[comptime] uses_pdl: bool) {
    if uses_pdl {
        ptx::griddepcontrol_wait();
    }
}

/// Calls [`launch_dependents()`] and [`wait()`], for a kernel that reads nothing before the wait.
#[cube]
pub fn launch_dependents_and_wait(#[comptime] uses_pdl: bool) {
    launch_dependents(uses_pdl);
    wait(uses_pdl);
}
