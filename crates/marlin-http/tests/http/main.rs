//! The API over a loopback socket, with a pseudo-model.

mod bodies;
mod chat;
mod completions;
mod connections;
mod form;
mod fuzz;
mod harmony;
mod hostile;
mod messages;
mod mutate;
mod other;
mod responses;
mod support;
mod tls;
mod xml;
