//! The program `burn-marlin`, run as a user runs it, on the shipped model and on small random ones.

mod bad_input;
mod checkpoints;
mod evaluate;
mod interrupted;
mod strangers;
mod support;
mod text;
