//! Tests of downloads from a server on this machine that speaks the hub's interface.

mod faults;
mod refused;
mod snapshots;
mod support;
