//! Tests of the public API, in one test binary.

mod awq;
mod bitmask;
mod checkpoint_read;
mod checkpoint_write;
mod common;
mod compressed_tensors;
mod config;
mod files;
mod float_values;
mod fp4;
mod fp8;
mod fragments;
mod fuzz;
mod golden;
mod gptq;
mod join;
mod layouts;
mod marlin24;
mod marlin_files;
mod plain;
mod quantization;
mod quantize;
mod read_layer;
mod slice;
mod spec;
mod two_four;
