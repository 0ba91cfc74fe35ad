//! Tests of the public API, as one program.

mod checkpoint_read;
mod checkpoint_write;
mod common;
mod compressed_tensors;
mod config;
mod fragments;
mod layouts;
mod plain;
mod quantization;
mod quantize;
mod spec;
