//! Clients that vanish, are slow, or many; the shutdown.

use crate::support::client::{bytes, connect, get, post, read};
use crate::support::server::{TestOptions, TestServer};
use marlin_http::{ApiOptions, ServeOptions};
use marlin_serve::SchedulerConfig;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

const JSON: (&str, &str) = ("content-type", "application/json");

/// The bytes of a completion's request.
fn request(prompt: &str, max_tokens: u32, stream: bool) -> Vec<u8> {
    let body = json!({
        "model": "alias", "prompt": prompt, "max_tokens": max_tokens, "stream": stream,
    });
    bytes(
        "POST",
        "/v1/completions",
        &[JSON],
        body.to_string().as_bytes(),
    )
}

/// Waits until something is so.
pub(crate) fn wait(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_client_that_vanishes_ends_its_request() {
    let server = TestServer::start();
    for stream in [true, false] {
        let mut connection = connect(server.address);
        connection
            .write_all(&request("\u{6}", 4000, stream))
            .unwrap();
        wait("it runs", || server.engine.metrics().running == 1);
        drop(connection);
        wait("it ends", || server.engine.metrics().running == 0);
    }
    assert_eq!(server.engine.metrics().ended.cancelled, 2);
}

#[test]
fn the_role_and_the_first_text_of_a_chat_are_one_write() {
    let server = TestServer::start();
    let messages = json!([{ "role": "user", "content": "\u{6}" }]);
    let body = json!({ "model": "alias", "messages": messages, "max_tokens": 9, "stream": true });
    let head = bytes(
        "POST",
        "/v1/chat/completions",
        &[JSON],
        body.to_string().as_bytes(),
    );
    let mut connection = connect(server.address);
    connection.write_all(&head).unwrap();
    let mut seen = String::new();
    let mut piece = [0; 1 << 16];
    while !seen.contains("data: ") {
        let len = connection.read(&mut piece).unwrap();
        assert!(len > 0, "the connection ended after {seen:?}");
        seen += std::str::from_utf8(&piece[..len]).unwrap();
    }
    let deltas: Vec<&str> = seen.split("\"delta\":").skip(1).collect();
    assert!(deltas.len() >= 2, "{seen}");
    assert!(deltas[0].starts_with("{\"role\":\"assistant\",\"content\":\"\"}"));
    assert!(deltas[1].starts_with("{\"content\":\""), "{seen}");
}

/// A request for 64 streams of 4000 tokens, some 180 MB.
fn flood() -> Vec<u8> {
    let body = json!({
        "model": "alias", "prompt": vec!["x"; 64], "max_tokens": 4000, "stream": true,
        "logprobs": 5,
    });
    bytes(
        "POST",
        "/v1/completions",
        &[JSON],
        body.to_string().as_bytes(),
    )
}

#[test]
fn a_reader_that_falls_behind_holds_up_nobody_and_loses_its_request() {
    let server = TestServer::with(TestOptions {
        event_buffer: 16,
        ..TestOptions::default()
    });
    let mut slow = connect(server.address);
    slow.write_all(&flood()).unwrap();
    wait("it runs", || server.engine.metrics().running > 0);
    let quick = json!({ "model": "alias", "prompt": "\u{1}quick\u{2}" });
    let answer = post(server.address, "/v1/completions", &quick).json();
    assert_eq!(answer["choices"][0]["text"], "quick");
    wait("it ends", || server.engine.metrics().running == 0);
    let last = read(&mut slow).unwrap().chunks().pop().unwrap();
    let message = last["error"]["message"].as_str().unwrap();
    assert!(message.contains("were not read in time"), "{message}");
}

/// The buffers of both sockets fill, and the connection ends after the time-out of writes.
#[test]
fn a_reader_that_takes_nothing_is_disconnected() {
    let mut serve = ServeOptions::default();
    serve.write_timeout = Duration::from_millis(300);
    let server = TestServer::with(TestOptions {
        serve,
        event_buffer: 1 << 20,
        ..TestOptions::default()
    });
    let mut slow = connect(server.address);
    slow.write_all(&flood()).unwrap();
    wait("it runs", || server.engine.metrics().running > 0);
    wait("it ends", || server.engine.metrics().running == 0);
    assert_eq!(server.engine.metrics().ended.cancelled, 64);
    let mut rest = Vec::new();
    _ = slow.read_to_end(&mut rest);
    assert!(!rest.ends_with(b"data: [DONE]\n\n\r\n0\r\n\r\n"));
}

#[test]
fn half_open_connections_are_closed_in_time() {
    let mut serve = ServeOptions::default();
    serve.header_timeout = Duration::from_millis(300);
    let mut api = ApiOptions::default();
    api.body_timeout = Duration::from_millis(300);
    let server = TestServer::with(TestOptions {
        serve,
        api,
        ..TestOptions::default()
    });
    let start = Instant::now();
    let parts: [&[u8]; 3] = [
        b"",
        b"POST /v1/comp",
        b"GET /health HTTP/1.1\r\nhost: a\r\n",
    ];
    for part in parts {
        let mut connection = connect(server.address);
        connection.write_all(part).unwrap();
        let mut rest = Vec::new();
        connection.read_to_end(&mut rest).unwrap();
    }
    // A connection that was used is closed, too.
    let mut connection = connect(server.address);
    connection
        .write_all(&bytes("GET", "/health", &[], &[]))
        .unwrap();
    assert_eq!(read(&mut connection).unwrap().status, 200);
    assert_eq!(connection.read(&mut [0]).unwrap(), 0);
    // A body that does not come is an error.
    let mut connection = connect(server.address);
    let head =
        b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{";
    connection.write_all(head).unwrap();
    let response = read(&mut connection).unwrap();
    assert_eq!(
        (response.status, &response.json()["error"]["code"]),
        (408, &json!("body_timeout"))
    );
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn a_body_of_1_gb_is_refused_before_it_comes() {
    let server = TestServer::start();
    let mut connection = connect(server.address);
    let head = "POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n";
    connection.write_all(head.as_bytes()).unwrap();
    connection
        .write_all(b"content-length: 1073741824\r\n\r\n")
        .unwrap();
    let response = read(&mut connection).unwrap();
    assert_eq!(
        (response.status, &response.json()["error"]["code"]),
        (413, &json!("body_too_large"))
    );
    // One whose length is not announced is refused when it is too long.
    let mut connection = connect(server.address);
    connection.write_all(head.as_bytes()).unwrap();
    connection
        .write_all(b"transfer-encoding: chunked\r\n\r\n")
        .unwrap();
    let mut reader = connection.try_clone().unwrap();
    let writer = thread::spawn(move || {
        let chunk = [b"100000\r\n".as_slice(), &vec![b' '; 1 << 20], b"\r\n"].concat();
        let start = Instant::now();
        // The server closes the connection.
        let mut written = 0_u64;
        while connection.write_all(&chunk).is_ok() {
            written += chunk.len() as u64;
            assert!(start.elapsed() < Duration::from_secs(10));
            assert!(written < 1 << 30, "1 GB was taken");
        }
    });
    if let Ok(response) = read(&mut reader) {
        assert_eq!(response.status, 413);
    }
    drop(reader);
    writer.join().unwrap();
    assert_eq!(get(server.address, "/health").status, 200);
}

/// Costs about 4 s.
#[test]
fn a_thousand_connections_are_answered() {
    let server = TestServer::start();
    let mut connections: Vec<_> = (0..1000).map(|_| connect(server.address)).collect();
    for (index, connection) in connections.iter_mut().enumerate() {
        let prompt = format!("\u{1}n{index}\u{2}");
        connection.write_all(&request(&prompt, 16, false)).unwrap();
    }
    for (index, connection) in connections.iter_mut().enumerate() {
        let response = read(connection).unwrap();
        assert_eq!(response.status, 200, "{}", response.text());
        assert_eq!(response.json()["choices"][0]["text"], format!("n{index}"));
    }
    let metrics = server.engine.metrics();
    assert_eq!((metrics.ended.stop, metrics.used_pages), (1000, 0));
}

#[test]
fn connections_past_the_limit_wait() {
    let mut serve = ServeOptions::default();
    serve.max_connections = 2;
    serve.header_timeout = Duration::from_millis(500);
    let server = TestServer::with(TestOptions {
        serve,
        ..TestOptions::default()
    });
    let idle: Vec<_> = (0..2).map(|_| connect(server.address)).collect();
    let start = Instant::now();
    // It is answered when the idle ones have run out of time.
    assert_eq!(get(server.address, "/health").status, 200);
    assert!(
        start.elapsed() > Duration::from_millis(200),
        "{:?}",
        start.elapsed()
    );
    drop(idle);
}

#[test]
fn a_full_queue_says_when_to_come_again() {
    let mut scheduler = SchedulerConfig::new(64);
    (scheduler.max_sequences, scheduler.max_waiting) = (1, 1);
    let server = TestServer::with(TestOptions {
        scheduler,
        ..TestOptions::default()
    });
    let mut first = connect(server.address);
    first.write_all(&request("\u{6}", 2000, false)).unwrap();
    wait("it runs", || server.engine.metrics().running == 1);
    let mut second = connect(server.address);
    second.write_all(&request("\u{6}", 2000, false)).unwrap();
    wait("it waits", || server.engine.metrics().waiting == 1);
    let body = json!({ "model": "alias", "prompt": "a" });
    let response = post(server.address, "/v1/completions", &body);
    assert_eq!(response.status, 429);
    assert_eq!(response.header("retry-after"), Some("1"));
    assert_eq!(response.json()["error"]["code"], "rate_limit_exceeded");
}

#[test]
fn a_shutdown_lets_requests_end_until_the_deadline() {
    // 200 steps of 5 ms: the request ends by itself.
    let mut server = TestServer::start();
    let mut connection = connect(server.address);
    connection.write_all(&request("\u{6}", 100, true)).unwrap();
    let mut idle = connect(server.address);
    idle.write_all(&bytes("GET", "/health", &[], &[])).unwrap();
    assert_eq!(read(&mut idle).unwrap().status, 200);
    wait("it runs", || server.engine.metrics().running == 1);
    server.stop();
    let response = read(&mut connection).unwrap();
    assert_eq!(
        response.chunks().last().unwrap()["choices"][0]["finish_reason"],
        "length"
    );
    server.join();
    // It would take 20 s: it is ended at the deadline.
    let mut serve = ServeOptions::default();
    serve.drain_timeout = Duration::from_millis(300);
    let mut server = TestServer::with(TestOptions {
        serve,
        ..TestOptions::default()
    });
    let mut connection = connect(server.address);
    connection.write_all(&request("\u{6}", 4000, true)).unwrap();
    wait("it runs", || server.engine.metrics().running == 1);
    let start = Instant::now();
    server.stop();
    server.join();
    assert!(
        start.elapsed() < Duration::from_secs(3),
        "{:?}",
        start.elapsed()
    );
    let mut rest = Vec::new();
    _ = connection.read_to_end(&mut rest);
    let rest = String::from_utf8(rest).unwrap();
    assert!(rest.contains("shutting_down"), "{rest}");
}

#[test]
fn time_outs_of_requests_have_their_status() {
    let mut api = ApiOptions::default();
    api.request_timeout = Some(Duration::from_millis(200));
    let server = TestServer::with(TestOptions {
        api,
        ..TestOptions::default()
    });
    let body = json!({ "model": "alias", "prompt": "\u{6}", "max_tokens": 4000 });
    let response = post(server.address, "/v1/completions", &body);
    let error: Value = response.json();
    assert_eq!(
        (response.status, &error["error"]["code"]),
        (504, &json!("timeout"))
    );
}
