//! Runs the server with a model whose tokens depend on every page that it reads.

mod failures;
mod grammar;
mod lifecycle;
mod load;
mod model;
mod support;
mod texts;
