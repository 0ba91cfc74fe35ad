//! Bodies that are not requests.

use crate::support::client::{Response, bytes, connect, get, read};
use crate::support::server::{TestOptions, TestServer};
use marlin_http::ApiOptions;
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The longest time that a body may take.
const LIMIT: Duration = Duration::from_secs(5);
/// Values that fields do not expect.
const VALUES: [&str; 22] = [
    "null",
    "true",
    "-1",
    "0",
    "1e9",
    "1e999",
    "18446744073709551616",
    "-9223372036854775808",
    "0.5",
    "\"\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "[]",
    "{}",
    "[[]]",
    "[null]",
    "{\"\":{}}",
    "{\"type\":\"function\"}",
    "[{\"role\":\"user\"}]",
    "[{\"type\":\"text\",\"text\":\"a\"}]",
    "{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"a\",\"schema\":{\"$ref\":\"#\"}}}",
    "\"auto\"",
];

/// Valid requests, from which the mutator starts.
fn seeds() -> Vec<(&'static str, String)> {
    let tool = json!({
        "type": "function",
        "function": { "name": "f", "description": "d", "parameters": { "type": "object" } },
    });
    let messages = json!([
        { "role": "system", "content": "s" },
        { "role": "user", "content": [{ "type": "text", "text": "\u{1}a\u{2}" }] },
    ]);
    let bodies = [
        (
            "/v1/chat/completions",
            json!({
                "model": "alias", "messages": messages, "max_tokens": 4, "n": 2, "seed": 1,
                "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "stream": true,
                "stream_options": { "include_usage": true }, "tools": [tool],
                "tool_choice": "auto", "logprobs": true, "top_logprobs": 1,
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "model": "alias", "messages": messages, "max_completion_tokens": 4,
                "response_format": { "type": "json_object" }, "logit_bias": {}, "min_p": 0.1,
                "top_k": 4, "presence_penalty": 1, "repetition_penalty": 1.1, "user": "u",
            }),
        ),
        (
            "/v1/completions",
            json!({
                "model": "alias", "prompt": ["a", "b"], "max_tokens": 4, "n": 1, "echo": true,
                "stop": "x", "stream": false, "seed": -1, "suffix": null,
            }),
        ),
        (
            "/v1/completions",
            json!({ "model": "alias", "prompt": [256, 97], "max_tokens": 2 }),
        ),
        (
            "/tokenize",
            json!({ "model": "alias", "messages": messages, "tools": [tool] }),
        ),
        (
            "/detokenize",
            json!({ "model": "alias", "tokens": [97, 98] }),
        ),
        (
            "/v1/messages",
            json!({
                "model": "alias", "max_tokens": 4, "system": "s", "stop_sequences": ["x"],
                "messages": [{ "role": "user", "content": [{ "type": "text", "text": "a" }] }],
                "tools": [{ "name": "f", "input_schema": { "type": "object" } }],
                "tool_choice": { "type": "auto" }, "stream": true, "temperature": 0.5,
            }),
        ),
        (
            "/v1/responses",
            json!({
                "model": "alias", "max_output_tokens": 4, "instructions": "i", "stream": true,
                "input": [{ "role": "user", "content": [{ "type": "input_text", "text": "a" }] }],
                "text": { "format": { "type": "text" } }, "store": false,
            }),
        ),
    ];
    bodies.map(|(path, body)| (path, body.to_string())).into()
}

/// Changes a body in a few places: bytes, values, structure.
fn mutate(body: &str, random: &mut StdRng) -> Vec<u8> {
    let mut body = body.as_bytes().to_vec();
    // Most bodies stay JSON, so that they get past the parser.
    if random.random_bool(0.7) {
        replace_value(&mut body, random);
        return body;
    }
    for _ in 0..random.random_range(1..4) {
        let at = random.random_range(0..=body.len());
        match random.random_range(0..5) {
            0 => body.truncate(at),
            1 => body.insert(at, random.random()),
            2 if at < body.len() => body[at] = random.random(),
            3 if at < body.len() => _ = body.remove(at),
            _ => {
                let depth = random.random_range(1..3000);
                let open = *[b"[".as_slice(), b"{\"a\":"].choose(random).unwrap();
                body.splice(at..at, open.repeat(depth));
            }
        }
    }
    body
}

/// Replaces a value of the body.
fn replace_value(body: &mut Vec<u8>, random: &mut StdRng) {
    let mut root: Value = serde_json::from_slice(body).unwrap();
    const MARK: &str = "\u{1f}mark";
    let mut paths = Vec::new();
    collect_paths(&root, &mut String::new(), &mut paths);
    let path = paths.choose(random).unwrap();
    let value = root.pointer_mut(path).unwrap();
    *value = Value::String(MARK.into());
    let marked = format!("\"{}\"", "\\u001fmark");
    let replaced = root
        .to_string()
        .replace(&marked, VALUES.choose(random).unwrap());
    *body = replaced.into_bytes();
}

/// Collects the pointers to all values.
fn collect_paths(value: &Value, path: &mut String, paths: &mut Vec<String>) {
    let length = path.len();
    let mut visit = |name: &str, value: &Value| {
        *path += &format!("/{}", name.replace('~', "~0").replace('/', "~1"));
        collect_paths(value, path, paths);
        path.truncate(length);
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| visit(name, value)),
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(index, value)| visit(&index.to_string(), value));
        }
        _ => {}
    }
    paths.push(path.clone());
}

/// Sends a body on a connection that is kept as long as the server keeps it.
fn ask(connection: &mut Option<TcpStream>, server: &TestServer, request: &[u8]) -> Response {
    let stream = connection.get_or_insert_with(|| connect(server.address));
    stream.write_all(request).unwrap();
    let response = read(stream).unwrap();
    if response.header("connection") == Some("close") {
        *connection = None;
    }
    response
}

/// Checks that an answer is one: 200, or an error in the form of the API.
fn check(path: &str, body: &[u8], response: &Response) {
    let shown = String::from_utf8_lossy(&body[..body.len().min(2000)]).into_owned();
    match response.status {
        200 => {}
        400 | 404 | 413 | 429 => {
            let error = response.json();
            if path.starts_with("/v1/messages") {
                assert_eq!(error["type"], "error", "{shown}");
            }
            assert!(error["error"]["message"].is_string(), "{error} for {shown}");
            assert!(error["error"]["type"].is_string(), "{error} for {shown}");
        }
        status => panic!("{status} {} for {path} {shown}", response.text()),
    }
}

/// Costs about 2 s.
#[test]
fn mutated_bodies_are_answered_or_refused_in_bounded_time() {
    let mut random = marlin_testing::rng();
    let server = TestServer::start();
    let seeds = seeds();
    let mut connection = None;
    let mut answered = 0;
    for (path, body) in &seeds {
        let request = bytes(
            "POST",
            path,
            &[("content-type", "application/json")],
            body.as_bytes(),
        );
        let response = ask(&mut connection, &server, &request);
        assert_eq!(response.status, 200, "{path} {body}: {}", response.text());
    }
    for _ in 0..2000 {
        let (path, body) = seeds.choose(&mut random).unwrap();
        let body = mutate(body, &mut random);
        let request = bytes("POST", path, &[("content-type", "application/json")], &body);
        let start = Instant::now();
        let response = ask(&mut connection, &server, &request);
        check(path, &body, &response);
        assert!(
            start.elapsed() < LIMIT,
            "{path} {}",
            String::from_utf8_lossy(&body)
        );
        answered += usize::from(response.status == 200);
    }
    println!("{answered} of 2000 were answered");
    assert!((20..1900).contains(&answered), "{answered}");
    assert_eq!(get(server.address, "/health").status, 200);
    assert_eq!(server.engine.metrics().used_pages, 0);
}

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
