//! Load tests of a server on a loopback socket that delays tokens as it is told and takes the
//! times itself.

mod faults;
mod loops;
#[cfg(target_os = "linux")]
mod overhead;
mod server;
mod times;
