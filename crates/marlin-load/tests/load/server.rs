//! A server of `/v1/completions` that waits before tokens, and that fails as it is told.

use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What happens to a request instead of an answer, after two tokens where it is in the stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    Status,
    Closed,
    Cut,
    Silent,
    Malformed,
    Huge,
    Reported,
    NoToken,
}

#[derive(Clone)]
pub struct Behaviour {
    /// The time before the first token.
    pub first: Duration,
    /// The time before each other token.
    pub gap: Duration,
    /// The fault of the request with a number.
    pub fault: fn(usize) -> Option<Fault>,
    /// True if prompts may be token IDs, which `/tokenize` returns.
    pub token_ids: bool,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            first: Duration::ZERO,
            gap: Duration::ZERO,
            fault: |_| None,
            token_ids: true,
        }
    }
}

/// What the server saw of a request.
pub struct Seen {
    pub body: Value,
    pub authorization: Option<String>,
    pub arrival: Instant,
    /// The times at which tokens were about to be written.
    pub tokens: Vec<Instant>,
}

#[derive(Default)]
pub struct Log {
    /// The requests by `x-request-id`.
    pub seen: Mutex<HashMap<String, Seen>>,
    pub connections: AtomicUsize,
    running: AtomicUsize,
    pub most_running: AtomicUsize,
}

/// A server with a thread for each connection, which accepts none after it is dropped.
pub struct Server {
    pub address: SocketAddr,
    pub log: Arc<Log>,
    stopped: Arc<AtomicBool>,
}

impl Server {
    pub fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (log, stopped) = (Arc::<Log>::default(), Arc::<AtomicBool>::default());
        let (own, end) = (log.clone(), stopped.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if end.load(Ordering::SeqCst) {
                    break;
                }
                let stream = stream.unwrap();
                stream.set_nodelay(true).unwrap();
                own.connections.fetch_add(1, Ordering::SeqCst);
                let (behaviour, log) = (behaviour.clone(), own.clone());
                // A client that closes the connection ends it.
                std::thread::spawn(move || _ = connection(stream, behaviour, &log));
            }
        });
        Self {
            address,
            log,
            stopped,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        // The thread that accepts connections looks at each.
        _ = TcpStream::connect(self.address);
    }
}

fn connection(stream: TcpStream, behaviour: Behaviour, log: &Log) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap();
        let header = |name: &str| {
            let mut lines = head.lines().filter_map(|line| line.split_once(": "));
            let line = lines.find(|(own, _)| own.eq_ignore_ascii_case(name));
            line.map(|(_, value)| value.to_string())
        };
        let len = header("content-length").map_or(0, |len| len.parse().unwrap());
        let mut body = vec![0; len];
        stream.read_exact(&mut body)?;
        let path = head.split(' ').nth(1).unwrap();
        match path {
            "/v1/models" => answer(&mut stream, 200, &json!({"data": [{"id": "delay"}]}))?,
            "/tokenize" if behaviour.token_ids => {
                let tokens: Vec<u32> = (7..300).chain(7..300).collect();
                answer(&mut stream, 200, &json!({"tokens": tokens}))?;
            }
            "/v1/completions" => {
                let id = header("x-request-id").unwrap();
                let body: Value = serde_json::from_slice(&body).unwrap();
                if body["prompt"].is_array() && !behaviour.token_ids {
                    answer(&mut stream, 400, &json!({"error": "no token IDs"}))?;
                    continue;
                }
                let seen = Seen {
                    body: body.clone(),
                    authorization: header("authorization"),
                    arrival: Instant::now(),
                    tokens: Vec::new(),
                };
                log.seen.lock().unwrap().insert(id.clone(), seen);
                let running = log.running.fetch_add(1, Ordering::SeqCst) + 1;
                log.most_running.fetch_max(running, Ordering::SeqCst);
                let result = complete(&mut stream, &behaviour, log, &id, &body);
                if result.is_err() {
                    // An answer that is complete has counted itself.
                    log.running.fetch_sub(1, Ordering::SeqCst);
                }
                result?;
            }
            _ => answer(&mut stream, 404, &json!({"error": "unknown"}))?,
        }
    }
}

fn answer(stream: &mut BufReader<TcpStream>, status: u16, body: &Value) -> std::io::Result<()> {
    let body = body.to_string();
    let len = body.len();
    let head = format!("HTTP/1.1 {status} x\r\ncontent-length: {len}\r\n\r\n{body}");
    stream.get_mut().write_all(head.as_bytes())
}

fn chunk(stream: &mut BufReader<TcpStream>, event: &str) -> std::io::Result<()> {
    let event = format!("data: {event}\n\n");
    let chunk = format!("{:x}\r\n{event}\r\n", event.len());
    stream.get_mut().write_all(chunk.as_bytes())
}

fn complete(
    stream: &mut BufReader<TcpStream>,
    behaviour: &Behaviour,
    log: &Log,
    id: &str,
    body: &Value,
) -> std::io::Result<()> {
    let number = id
        .strip_prefix("load-")
        .and_then(|id| id.rsplit('-').next());
    let fault = number.and_then(|number| (behaviour.fault)(number.parse().unwrap()));
    let closed = || Err(std::io::Error::other("closed on purpose"));
    let max_tokens = body["max_tokens"].as_u64().unwrap();
    match fault {
        Some(Fault::Status) => {
            log.running.fetch_sub(1, Ordering::SeqCst);
            return answer(stream, 503, &json!({"error": "busy"}));
        }
        Some(Fault::Closed) => return closed(),
        _ => {}
    }
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.get_mut().write_all(head.as_bytes())?;
    let count = if fault.is_some() { 2 } else { max_tokens };
    for token in 0..count {
        if fault == Some(Fault::NoToken) {
            break;
        }
        let wait = if token == 0 {
            behaviour.first
        } else {
            behaviour.gap
        };
        if !wait.is_zero() {
            std::thread::sleep(wait);
        }
        let now = Instant::now();
        log.seen
            .lock()
            .unwrap()
            .get_mut(id)
            .unwrap()
            .tokens
            .push(now);
        chunk(
            stream,
            r#"{"choices": [{"text": "t", "index": 0, "finish_reason": null}]}"#,
        )?;
    }
    match fault {
        Some(Fault::Cut) => return closed(),
        Some(Fault::Silent) => {
            // Until the client closes the connection.
            stream.read_exact(&mut [0])?;
            return closed();
        }
        Some(Fault::Malformed) => chunk(stream, "{\"choices\": [")?,
        Some(Fault::Huge) => chunk(stream, &"x".repeat(2 << 20))?,
        Some(Fault::Reported) => chunk(stream, r#"{"error": {"message": "lost"}}"#)?,
        _ => {}
    }
    chunk(
        stream,
        r#"{"choices": [{"text": "", "index": 0, "finish_reason": "length"}]}"#,
    )?;
    let prompt = match &body["prompt"] {
        Value::Array(tokens) => tokens.len(),
        text => text.as_str().unwrap().split(' ').count() + 1,
    };
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": max_tokens});
    chunk(stream, &json!({"choices": [], "usage": usage}).to_string())?;
    // Before the end is sent: the client may begin the next request at once.
    log.running.fetch_sub(1, Ordering::SeqCst);
    let end = stream
        .get_mut()
        .write_all(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    if end.is_err() {
        log.running.fetch_add(1, Ordering::SeqCst);
    }
    end
}
