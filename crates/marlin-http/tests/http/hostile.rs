//! Bodies and heads that are too long, or not HTTP.

use crate::support::client::{bytes, connect, get, read};
use crate::support::server::{TestOptions, TestServer};
use marlin_http::ApiOptions;
use std::io::Write;

#[test]
fn bodies_up_to_the_limit_do_not_hold_up_others() {
    let mut api = ApiOptions::default();
    api.max_body_bytes = 1 << 20;
    let server = TestServer::with(TestOptions {
        api,
        ..TestOptions::default()
    });
    let lists = [
        "[".repeat(1 << 20),
        format!("{{\"prompt\":\"{}\"}}", "a ".repeat(500_000)),
        format!("{{\"prompt\":[{}0]}}", "0,".repeat(500_000)),
    ];
    for body in lists {
        let request = bytes(
            "POST",
            "/v1/completions",
            &[("content-type", "application/json")],
            body.as_bytes(),
        );
        let mut connection = connect(server.address);
        connection.write_all(&request).unwrap();
        let response = read(&mut connection).unwrap();
        assert!((400..500).contains(&response.status), "{}", response.status);
        assert!(response.json()["error"]["message"].is_string());
    }
}

#[test]
fn heads_that_are_not_http_are_closed() {
    let server = TestServer::start();
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(100_000));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(1000));
    let endless = "x".repeat(1 << 20);
    let heads = [
        "\r\n\r\n\r\n",
        "GET\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}\u{fc}\u{3}\u{3}",
        "GET / HTTP/9.9\r\n\r\n",
        "POST /tokenize HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        "POST /tokenize HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        "POST /tokenize HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST /tokenize HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n",
        "GET / HTTP/1.1\r\nbad header: \0\r\n\r\n",
        &long,
        &many,
        &endless,
    ];
    for head in heads {
        let mut connection = connect(server.address);
        _ = connection.write_all(head.as_bytes());
        _ = connection.shutdown(std::net::Shutdown::Write);
        if let Ok(response) = read(&mut connection) {
            let shown = &head[..head.len().min(80)];
            assert!(
                (400..=505).contains(&response.status),
                "{} for {shown:?}",
                response.status
            );
        }
    }
    assert_eq!(get(server.address, "/health").status, 200);
}
