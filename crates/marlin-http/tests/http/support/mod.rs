//! A server of a pseudo-model, and a client.

#![allow(dead_code, reason = "the example takes a part")]

pub mod client;
pub mod model;
pub mod server;
pub mod tool;
