//! The page at `/` and the Grafana dashboard.

mod browser;
mod dashboard;
mod served;
#[path = "../http/support/mod.rs"]
mod support;
