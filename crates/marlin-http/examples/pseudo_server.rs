//! A server of the tests' pseudo-model, for clients in other languages. It prints its address and
//! runs until its standard input ends.

#[path = "../tests/http/support/mod.rs"]
mod support;

use std::io::Read;
use support::server::TestServer;

fn main() {
    let server = TestServer::start();
    println!("http://{}", server.address);
    // What is read does not matter.
    _ = std::io::stdin().read_to_end(&mut Vec::new());
    drop(server);
}
