//! Tests of the program `burn-marlin`, run as a user runs it, on the shipped model and on small
//! random models.

mod advise;
mod bad_input;
#[cfg(feature = "serve")]
mod bench_serve;
mod chat;
mod command_line;
mod doctor;
mod evaluate;
#[cfg(feature = "hub")]
mod hub;
mod inspect;
mod interrupted;
mod kernels;
mod mixtures;
mod progress;
mod quantize;
mod quantize_methods;
mod quantize_refused;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "serve")]
mod serve_load;
mod support;
mod tensor_parallel;
mod text;
#[cfg(unix)]
mod tutorials;
mod untrusted_input;
