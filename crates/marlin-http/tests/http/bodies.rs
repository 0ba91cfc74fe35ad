//! Bodies that are almost requests.

use crate::fuzz::requests;
use crate::mutate::mutate;
use crate::support::client::{Response, bytes, connect, get, read};
use crate::support::server::{TestOptions, TestServer};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The environment variable with the number of bodies.
const VARIABLE: &str = "MARLIN_HTTP_BODIES";
/// The longest time that a body may take.
const LIMIT: Duration = Duration::from_secs(5);
/// The clients that send bodies at the same time.
const CLIENTS: usize = 4;

/// Sends a body on a connection that is kept as long as the server keeps it.
fn ask(
    connection: &mut Option<TcpStream>,
    server: &TestServer,
    path: &str,
    body: &[u8],
) -> Response {
    let request = bytes("POST", path, &[("content-type", "application/json")], body);
    let stream = connection.get_or_insert_with(|| connect(server.address));
    // A server that refuses a body need not read all of it.
    _ = stream.write_all(&request);
    let response = read(stream).unwrap_or_else(|error| panic!("{error} for {path} {}", show(body)));
    if response.header("connection") == Some("close") {
        *connection = None;
    }
    response
}

/// The start of a body.
fn show(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(2000)]).into_owned()
}

/// Checks that an answer is one: 200, or an error in the form of the API.
fn check(path: &str, body: &[u8], response: &Response) {
    match response.status {
        200 => {
            // An error after the start of a stream is its last event.
            let text = response.text();
            let failed = ["\"server_error\"", "\"api_error\""];
            let failed = failed.iter().any(|kind| text.contains(kind));
            assert!(!failed, "{text} for {path} {}", show(body));
        }
        400 | 404 | 413 | 429 | 501 => {
            let error = response.json();
            if path.starts_with("/v1/messages") {
                assert_eq!(error["type"], "error", "{}", show(body));
            }
            let is_error =
                error["error"]["message"].is_string() && error["error"]["type"].is_string();
            assert!(is_error, "{error} for {}", show(body));
        }
        status => panic!("{status} {} for {path} {}", response.text(), show(body)),
    }
}

/// 2,000 bodies, in about 3 s; another number can be set with `MARLIN_HTTP_BODIES`.
#[test]
fn mutated_bodies_are_answered_or_refused_in_bounded_time() {
    let count: usize = std::env::var(VARIABLE).map_or(2000, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{VARIABLE}: `{text}` is not a number of bodies"))
    });
    let mut random = marlin_testing::rng();
    let server = TestServer::with(TestOptions {
        faults: false,
        // The model is faster than the clients read.
        event_buffer: 8192,
        ..TestOptions::default()
    });
    let seeds = requests();
    for (path, body) in &seeds {
        let response = ask(&mut None, &server, path, body.to_string().as_bytes());
        assert_eq!(response.status, 200, "{path} {body}: {}", response.text());
        check(path, &[], &response);
    }
    let answered = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let mut random = StdRng::seed_from_u64(random.random());
            let (seeds, server, answered) = (&seeds, &server, &answered);
            scope.spawn(move || {
                let mut connection = None;
                for _ in (client..count).step_by(CLIENTS) {
                    let (path, body) = seeds.choose(&mut random).unwrap();
                    let body = mutate(body, seeds, &mut random);
                    let start = Instant::now();
                    let response = ask(&mut connection, server, path, &body);
                    let elapsed = start.elapsed();
                    check(path, &body, &response);
                    assert!(elapsed < LIMIT, "{elapsed:?} for {path} {}", show(&body));
                    answered.fetch_add(usize::from(response.status == 200), Ordering::Relaxed);
                }
            });
        }
    });
    let answered = answered.into_inner();
    println!("{answered} of {count} bodies were answered");
    assert!(
        (count / 100..count * 9 / 10).contains(&answered),
        "{answered}"
    );
    assert_eq!(get(server.address, "/health").status, 200);
    let start = Instant::now();
    while server.engine.metrics().used_pages + server.engine.metrics().running > 0 {
        assert!(start.elapsed() < LIMIT, "pages are still used");
        std::thread::sleep(Duration::from_millis(1));
    }
}
